"""Golden decisions: what the core decided before it was rebuilt, and the test that it decides the same now."""
