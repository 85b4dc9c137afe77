"""A run's folder as the service reads it: what it was given, its tape, and what its processes said."""
