"""The data plane: everything that happens to parameters once they have left an island. No Ray, no JAX, no decisions.

    shard            the fragments that one process owns: holds contributions, validates, merges, journals, publishes
    validation       which payloads may enter a merge, and how far they are from Θ
    payload_table    the contributions held, by payload id
    outer_state      Θ, momentum and version of every fragment, and the merge
    outer_gradient   many islands' displacements → one outer gradient
    outer_optimizer  outer gradient → the next parameters
    journaled_store  outer step, then the journal, then the announcement: in that order
    journal          what merges made, on disk, and its reconciliation with the tape
    wire_format      a fragment's tensors as bytes, and back, checked
    codec            how the values of a tensor become bytes: their names in one module, the codecs in another
    fragment_map     which tensor belongs to which of the P fragments
    tensors          named arrays and their digest

The control plane (``core``, ``tape``) knows fragments, payload ids, versions and digests only. Whoever drives a shard gives
it a thread or a virtual clock: ``runtime`` live, ``tests/swarm`` on a simulated disk.
"""
