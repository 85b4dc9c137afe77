"""A fleet's tape without a disk, and the plan that its header holds."""

from __future__ import annotations

from typing import Any

from orchestrator.elastic import DuringStall
from orchestrator.simulation.distributions import parse
from orchestrator.simulation.fleet import DISTRIBUTIONS, FleetPlan, Scavenged, System
from orchestrator.tape.schema import Digest, FleetHeader, Footer, encode_footer, encode_header


def plan_of(header: FleetHeader) -> FleetPlan:
    """The plan in a tape's header, to be simulated again."""
    given: dict[str, Any] = dict(header.plan)
    for name in DISTRIBUTIONS:
        given[name] = parse(given[name])
    given["system"], given["during_stall"] = System(given["system"]), DuringStall(given["during_stall"])
    given["step_factors"] = tuple(given["step_factors"])
    given["scavenged"] = tuple(Scavenged(**extra) for extra in given["scavenged"])
    return FleetPlan(**given)


class DigestSink:
    """Keeps the digest that a written tape would have, and no lines."""

    def __init__(self, header: FleetHeader) -> None:
        self.digest = Digest()
        self.digest.add(encode_header(header))
        self.count = 0

    def append_lines(self, lines: bytes, count: int) -> None:
        self.digest.add_all(lines)
        self.count = count


class TextSink(DigestSink):
    """Keeps the whole tape as text."""

    def __init__(self, header: FleetHeader) -> None:
        super().__init__(header)
        self._parts = [encode_header(header) + "\n"]

    def append_lines(self, lines: bytes, count: int) -> None:
        super().append_lines(lines, count)
        self._parts.append(lines.decode())

    def sealed(self) -> str:
        return "".join(self._parts) + encode_footer(Footer(self.count, self.digest.hex())) + "\n"
