"""Merge arithmetic: numpy in, numpy out. No clock, no disk, no Ray, no JAX.

    fragment_map     which tensor belongs to which of the P fragments
    wire             a fragment's parameters as bytes, and back, checked
    outer_gradient   many islands' displacements → one outer gradient
    outer_optimizer  outer gradient → the next parameters
    outer_state      the synchroniser's parameters, momentum and versions: where the four meet
    benchmark        the same work at a stated size, for whoever has a clock

May import ``core.vocabulary``, ``errors``, numpy and ml_dtypes.
"""
