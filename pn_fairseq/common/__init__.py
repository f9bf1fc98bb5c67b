"""What several floors use: messages, files, checkpoints, the file of ``--norm-probe``."""
