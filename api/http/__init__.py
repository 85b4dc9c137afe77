"""HTTP for the service and its clients: connections, limits, problem documents and back, server-sent events."""
