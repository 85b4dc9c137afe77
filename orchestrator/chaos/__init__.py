"""Faults as data: plans, when they strike, how far they may go, and the verdict. Pure: whoever drives it strikes."""
