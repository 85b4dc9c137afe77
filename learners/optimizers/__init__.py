"""The inner optimizer: what one island does with a gradient, and at which learning rate.

    inner      kinds by name, or a factory's; clipping, weight decay and rates by group of tensors
    schedules  the learning rate as a pure function of where the job is
    groups     which settings apply to which tensor

Nothing here knows of fragments, islands or devices.
"""
