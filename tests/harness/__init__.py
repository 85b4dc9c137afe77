"""A job around the real core, in the few forms that tests need. ``tests/README.md`` says which."""
