"""Checkpoints as the service shows them, and as it finds the one that a submitted job goes on from."""
