"""Checkpoints on disk: their contents, how one is written whole, and how a damaged one is detected."""
