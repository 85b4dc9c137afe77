"""Checkpoints on disk: what is in one, how it comes to be whole, and how it is known not to be."""
