"""The simulated world itself: its determinism, its faults, and that its checkers bite."""
