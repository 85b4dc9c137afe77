"""Chaos: plans, their schedules, their conduct and verdicts, simulated and against the clockwork."""
