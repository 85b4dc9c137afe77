"""Distributions of durations, parsed from plain data: constant, exponential, uniform, log-normal, or recorded samples.

    parse("30min"), parse({"exponential": "30min"}), parse({"uniform": ["1min", "5min"]}),
    parse({"lognormal": {"median": "30min", "sigma": 0.8}}), parse({"samples": [18, 22.5, "1min"]})

All draws come from the ``random.Random`` that is passed in. Results of logarithm and exponential are rounded down to whole
microseconds: mathematical libraries may differ in the last bit, and the digest of a tape must be the same on all machines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from orchestrator.core.vocabulary import Duration
from orchestrator.errors import ConfigurationError
from orchestrator.specification.bounds import DURATION_MAX_S
from orchestrator.system.plain import brief

UNITS: Mapping[str, Duration] = {
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 7 * 86400.0,
    "y": 365.25 * 86400.0,
}
"""The units of durations, in seconds. A year is a Julian year of 365.25 days."""

_DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-z]*)\s*", re.ASCII)
TEXT_CHARACTERS_MAX = 64
SAMPLES_MAX = 100_000
_FORMS = (
    "a duration, {exponential: 30min}, {uniform: [1min, 5min]}, {lognormal: {median: 30min, sigma: 0.8}} "
    "or {samples: [18, 22]}"
)


@dataclass(frozen=True, slots=True)
class Constant:
    """A fixed duration."""

    seconds: Duration

    @property
    def mean(self) -> Duration:
        return self.seconds

    def draw(self, random: Random) -> Duration:
        return self.seconds

    def plain(self) -> Any:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Exponential:
    """The memoryless distribution: the expected remaining time is always the mean."""

    mean: Duration

    def draw(self, random: Random) -> Duration:
        return int(-math.log(1.0 - random.random()) * self.mean * 1e6) / 1e6

    def plain(self) -> Any:
        return {"exponential": self.mean}


@dataclass(frozen=True, slots=True)
class Uniform:
    """A uniform distribution from ``low`` to ``high``."""

    low: Duration
    high: Duration

    @property
    def mean(self) -> Duration:
        return (self.low + self.high) / 2.0

    def draw(self, random: Random) -> Duration:
        return self.low + (self.high - self.low) * random.random()

    def plain(self) -> Any:
        return {"uniform": [self.low, self.high]}


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution, exp(N(ln median, sigma²)). Repairs by people look like it: mostly soon, some very late."""

    median: Duration
    sigma: float

    @property
    def mean(self) -> Duration:
        return self.median * math.exp(self.sigma**2 / 2.0)

    def draw(self, random: Random) -> Duration:
        """Draw by the cosine half of the Box–Muller transform, which always uses two random numbers."""
        radius = math.sqrt(-2.0 * math.log(1.0 - random.random()))
        normal = radius * math.cos(2.0 * math.pi * random.random())
        return int(self.median * math.exp(self.sigma * normal) * 1e6) / 1e6

    def plain(self) -> Any:
        return {"lognormal": {"median": self.median, "sigma": self.sigma}}


@dataclass(frozen=True, slots=True)
class Empirical:
    """Recorded durations, each equally likely."""

    samples: tuple[Duration, ...]

    @property
    def mean(self) -> Duration:
        return math.fsum(self.samples) / len(self.samples)

    def draw(self, random: Random) -> Duration:
        return self.samples[int(random.random() * len(self.samples))]

    def plain(self) -> Any:
        return {"samples": list(self.samples)}


Distribution = Constant | Exponential | Uniform | LogNormal | Empirical
"""Each distribution has ``draw(random)``, ``mean``, and ``plain()``, which ``parse`` reads back."""


def duration(value: Any) -> Duration:
    """Parse a number of seconds, or a number with a unit. Raises ConfigurationError with the remedy."""
    if isinstance(value, str):
        matched = _DURATION.fullmatch(value) if len(value) <= TEXT_CHARACTERS_MAX else None
        if matched is None or (matched[2] or "s") not in UNITS:
            raise ConfigurationError(
                detail=f"{brief(value)} is not a duration. Write a number and one of the units {', '.join(UNITS)}: "
                "90s, 30min, 1y."
            )
        seconds = float(matched[1]) * UNITS[matched[2] or "s"]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(max(-1, min(value, 2 * DURATION_MAX_S)))  # an integer may be beyond every float
    else:
        raise ConfigurationError(
            detail=f"{brief(value)} is not a duration. Write seconds, or a number with a unit: 90s, 30min, 1y."
        )
    if not 0.0 <= seconds <= DURATION_MAX_S:
        raise ConfigurationError(
            detail=f"{brief(value)} is not a valid duration. Write a number from 0 to {DURATION_MAX_S:g} s."
        )
    return seconds


def parse(value: Any) -> Distribution:
    """Parse a distribution from plain data. Raises ConfigurationError, which quotes the value and says what to write."""
    if isinstance(value, Constant | Exponential | Uniform | LogNormal | Empirical):
        return value
    if not isinstance(value, Mapping):
        return Constant(duration(value))
    if len(value) != 1:
        raise ConfigurationError(detail=f"{brief(value)} has {len(value)} distributions. Write exactly one: {_FORMS}.")
    ((kind, parameter),) = value.items()
    match kind:
        case "constant":
            return Constant(duration(parameter))
        case "exponential":
            return Exponential(_positive(kind, parameter))
        case "uniform":
            return _uniform(parameter)
        case "lognormal":
            return _lognormal(parameter)
        case "samples":
            return _empirical(parameter)
    raise ConfigurationError(detail=f"{brief(kind)} is not a distribution. Write {_FORMS}.")


def _positive(kind: str, value: Any) -> Duration:
    seconds = duration(value)
    if seconds == 0.0:
        raise ConfigurationError(
            detail=f"{kind}: {brief(value)} must be more than 0. For no delay at all, write 0 instead of a distribution."
        )
    return seconds


def _uniform(bounds: Any) -> Uniform:
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
        raise ConfigurationError(
            detail=f"uniform: {brief(bounds)} is not a range. Write two durations: {{uniform: [1min, 5min]}}."
        )
    low, high = duration(bounds[0]), duration(bounds[1])
    if low > high:
        raise ConfigurationError(
            detail=f"uniform: {brief(bounds)} ends before it begins. Write the smaller duration first."
        )
    return Uniform(low, high)


def _lognormal(parameters: Any) -> LogNormal:
    remedy = "Write {lognormal: {median: 30min, sigma: 0.8}}."
    if not isinstance(parameters, Mapping) or set(parameters) != {"median", "sigma"}:
        raise ConfigurationError(detail=f"lognormal: {brief(parameters)} needs exactly median and sigma. {remedy}")
    sigma = parameters["sigma"]
    if isinstance(sigma, bool) or not isinstance(sigma, int | float) or not 0.0 <= sigma <= 5.0:
        raise ConfigurationError(
            detail=f"lognormal: sigma {brief(sigma)} must be a number from 0 to 5 without a unit. {remedy}"
        )
    return LogNormal(_positive("lognormal", parameters["median"]), float(sigma))


def _empirical(samples: Any) -> Empirical:
    if not isinstance(samples, Sequence) or isinstance(samples, str) or not 0 < len(samples) <= SAMPLES_MAX:
        raise ConfigurationError(
            detail=f"samples: {brief(samples)} is not a list of durations. Write {{samples: [18, 22.5, 1min]}} with at "
            f"most {SAMPLES_MAX:,} values."
        )
    return Empirical(tuple(duration(item) for item in samples))
