"""Find a free port for a server that binds it later, and perhaps again after it died; and see whether a port answers.

Linux gives outgoing connections and servers on port 0, such as each process of Ray, a port of its ephemeral range, by
default 32768 to 60999. A free port of that range may be taken before the server binds it, or while the server is dead. So
the port is drawn below that range, and above Ray's default for its workers, 10002 to 19999.
"""

from __future__ import annotations

import ipaddress
import random
import re
import socket
from enum import StrEnum

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")
FIRST, LAST = 20_000, 29_999
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*\.?")
REACH_S = 1.0


def is_loopback(host: str) -> bool:
    """Return whether this name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Return whether this is an address or a possible host name. For others the system's resolver fails oddly."""
    try:
        ipaddress.ip_address(text)
        return "%" not in text
    except ValueError:
        return HOST.fullmatch(text) is not None


def free_port(host: str = LOOPBACK) -> int:
    """Return a random port from ``FIRST`` to ``LAST`` that is free at this address of this host.

    Raises OSError if the address is not of this host, or none of these ports is free.
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


def refuse_uncallable(address: str) -> None:
    """Raise OSError unless a server of this machine can be called at this address.

    A server can take the address of a group or of all machines of a network, too, which no client can call.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        probe.listen(1)
        socket.create_connection(probe.getsockname()[:2], timeout=REACH_S).close()


class Reach(StrEnum):
    """The outcome of a connection to a port: accepted, refused by the machine, or no answer, as when it is cut off."""

    TAKEN = "taken"
    REFUSED = "refused"
    NOTHING = "nothing"


def reach(host: str, port: int) -> Reach:
    """Takes up to a second to say ``NOTHING``. A stopped process's connections are taken, by its kernel."""
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except ConnectionRefusedError:
        return Reach.REFUSED
    except OSError:
        return Reach.NOTHING
    return Reach.TAKEN
