"""The documentation of atoll, and the programs that generate its reference pages."""
