"""Certificates of machines and of processes: their authorities, the folders that hold them, and their checks.

This package knows nothing of Ray, nor of the content of connections.
"""

AUTHORITY_DAYS, MACHINE_DAYS = 3650, 365
"""One of Ray's servers keeps the certificate with which it started, so a machine's certificate must outlast its uptime."""
