"""The inner optimizer: what one island does with a gradient, and at which learning rate.

Nothing here knows of fragments, islands or devices.
"""
