"""The swarm, a proof beside the product: jobs drawn from seeds, simulated with faults, checked after every event."""
