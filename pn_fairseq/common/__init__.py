"""What several layers use: messages, files, checkpoints, the file of ``--norm-probe``."""
