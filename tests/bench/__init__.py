"""Speeds, as ratios within one run or per second on this machine. Not tests: a goal may be missed on a slow machine.

That they run at all, and that a missed goal is told, is what ``test_small`` looks at.
"""
