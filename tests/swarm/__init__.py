"""The swarm tests whole jobs: drawn from seeds, simulated with faults, and checked after every event."""
