"""Command-line tools for checkpoints."""
