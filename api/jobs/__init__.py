"""The service's jobs: it takes, queues, starts, watches and commands them, over a port to whatever runs them."""
