"""Simulations from the command line: presets, the worlds that files mean, results as tables, the tapes they leave."""
