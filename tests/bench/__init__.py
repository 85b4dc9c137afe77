"""Speeds, as ratios within one run or per second on this machine. Not tests: nothing here passes or fails a build."""
