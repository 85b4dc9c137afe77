"""What HTTP asks of a service and of its clients: whom to answer, problem documents and back, server-sent events."""
