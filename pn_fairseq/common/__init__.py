"""What everything else may use: messages, files, the machine, checkpoints, the published tables."""
