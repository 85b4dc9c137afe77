"""Plans of faults that the service runs: rows for what was decided, a thread for each run, and its verdict."""
