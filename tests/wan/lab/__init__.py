"""The WAN lab: four ways to train on the same long, thin lines, in one run. ``make wan-lab``."""
