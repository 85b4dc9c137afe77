"""Training a whole job in one process, in virtual time, with real mathematics and the real core.

The one package that may import both the decisions and the learners: it is an entry point (``python -m``), not a shell.
"""
