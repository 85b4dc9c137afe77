"""The data plane: everything that happens to parameters once they have left an island. No Ray, no JAX, no decisions.

   shard            the fragments that one process owns: holds contributions, validates, merges, journals, publishes
   validation       which payloads may enter a merge, and how far they are from Θ
   outer_state      Θ, momentum and version of every fragment; the average of displacements, and the merge
   outer_optimizer  outer gradient → the next parameters
   kernels          the arithmetic of both, in C and in NumPy
   journaled_store  outer step, then the journal, then the announcement: in that order
   journal          the results of merges on disk, and its reconciliation with the tape
   wire_format      a fragment's tensors as bytes, and back, checked
   codec            how the values of a tensor become bytes: their names in one module, the codecs in another
   holding, parts   the part of the model that one process has, and parts of encoded tensors
   fragment_map     which piece belongs to which of the P fragments
   pieces, tensors  pieces of tensors and roles; named arrays and their digest

The control plane (``core``, ``tape``) knows only fragments, payload ids, versions and digests. A shard's driver gives
it a thread or a virtual clock: ``runtime`` live, ``tests/swarm`` on a simulated disk.
"""
