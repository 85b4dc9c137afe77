"""Speeds, as ratios within one run or per second on this machine. These are not tests: a slow machine may miss a goal.

``test_small`` checks that the benches run at all and that a missed goal is reported.
"""
