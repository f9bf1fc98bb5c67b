"""What several layers share: messages, files, checkpoints and command-line conventions."""
