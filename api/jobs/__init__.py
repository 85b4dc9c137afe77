"""What the service does with jobs: takes, queues, starts, looks at and commands them, over a port to whatever runs them."""
