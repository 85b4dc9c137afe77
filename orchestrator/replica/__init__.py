"""The island's side of the protocol, sans-I/O: positions, offers, adoptions, reports, as a function of what happened.

``replica.Replica`` is to an island what ``core.synchroniser`` is to the service. The live island (``learners.loop``), the
simulated one (``simulation.island``), the laboratory and the tests drive the same code.
"""
