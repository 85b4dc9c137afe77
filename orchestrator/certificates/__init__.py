"""Certificates of machines and of processes: who issues them, the folders that hold them, and what they are good for.

Refuses to know Ray, and what is said over the connections.
"""

AUTHORITY_DAYS, MACHINE_DAYS = 3650, 365
"""A server of Ray's keeps the certificate that it began with: a machine's lasts longer than it runs without a break."""
