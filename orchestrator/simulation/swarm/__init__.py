"""Whole configurations from seeds, simulated in rough weather, with every sentence checked after every event."""
