"""The parameter channel against real sockets, real certificates and processes that are killed."""
