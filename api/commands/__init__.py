"""The command line's commands, one module for each kind. All but up, down and demo are clients of the REST API."""
