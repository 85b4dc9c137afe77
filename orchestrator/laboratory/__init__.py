"""Trains a whole job in one process, in virtual time, with a real model and the real core.

This is the only package that may import both the core and the learners: it is an entry point (``python -m``), not a shell.
"""
