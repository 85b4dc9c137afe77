"""The island's side of the protocol, without trainers, threads and clocks."""
