"""The failure matrix as simulated jobs."""
