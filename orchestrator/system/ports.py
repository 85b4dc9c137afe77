"""A free port for a server that binds it later, and perhaps again after its death.

Linux gives whoever asks for any port one of its ephemeral range, by default 32768 to 60999: every outgoing connection, and
every server that listens on port 0, as each process of Ray does. A port of that range that is free now may be taken before
the server binds it, or while it is dead. So the port is drawn below that range, and above Ray's default for its workers,
10002 to 19999.
"""

from __future__ import annotations

import ipaddress
import random
import re
import socket

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")
FIRST, LAST = 20_000, 29_999
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*\.?")


def is_loopback(host: str) -> bool:
    """Whether this name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Whether this can be a host's name, or is an address: what cannot makes the system's own look-up fail oddly."""
    try:
        ipaddress.ip_address(text)
        return "%" not in text
    except ValueError:
        return HOST.fullmatch(text) is not None


def free_port(host: str = LOOPBACK) -> int:
    """A port of ``FIRST`` to ``LAST`` on which nobody listens at this address of this host, drawn anew each time.

    Raises OSError where the address is not of this host, or none of these ports is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.SystemRandom().sample(range(FIRST, LAST + 1), LAST + 1 - FIRST):
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
                return port
            except OSError as error:
                last = error
    raise last
