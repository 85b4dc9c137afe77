"""Whole configurations from seeds, simulated in event faults, with every sentence checked after every event."""
