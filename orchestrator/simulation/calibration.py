"""Fits the parameters of the fleet model to the two published M = 1 rows: ``python -m orchestrator.simulation.calibration``.

This file has the published cells, the candidate models, and their least-squares fits, in percentage points, by the closed
forms of ``oracles`` (the simulator agrees with them within 0.5 pp, and is noisier). It reproduces ``fleet.RESTART_S`` and
``fleet.STALL_S``. The 20 cells of two and more learners are not used for fitting: they are predicted afterwards.

Two parameters are fitted: R on the row without elasticity, and one stall S = D = U on the elastic row. The product of a
slice's size and the time that it is away is assumed (``fleet.RETURN_S``, ``fleet.CHIPS_PER_SLICE``): return times between
zero and an hour change the mean error by less than 0.2 pp, so ten cells cannot determine it.

Source of the cells: Decoupled DiLoCo, arXiv:2604.21428 (simulated goodput; a chip is interrupted once a year on average).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.vocabulary import Duration
from orchestrator.elastic import DuringStall
from orchestrator.simulation import oracles
from orchestrator.simulation.distributions import UNITS
from orchestrator.simulation.fleet import CHIPS_PER_SLICE, RETURN_S

MTBI_CHIP: Duration = UNITS["y"]
NO_ELASTICITY: Mapping[int, float] = {150_000: 0.72, 300_000: 0.57, 600_000: 0.38, 1_200_000: 0.27, 2_400_000: 0.18}
ELASTIC: Mapping[int, float] = {150_000: 0.88, 300_000: 0.80, 600_000: 0.69, 1_200_000: 0.58, 2_400_000: 0.40}
"""Published goodput of one job by number of chips: the cells that are fitted."""
DECOUPLED: Mapping[int, Mapping[int, float]] = {
    2: {150_000: 0.94, 300_000: 0.88, 600_000: 0.80, 1_200_000: 0.70, 2_400_000: 0.54},
    4: {150_000: 0.96, 300_000: 0.93, 600_000: 0.89, 1_200_000: 0.82, 2_400_000: 0.73},
    8: {150_000: 0.98, 300_000: 0.96, 600_000: 0.94, 1_200_000: 0.88, 2_400_000: 0.80},
    16: {150_000: 0.99, 300_000: 0.98, 600_000: 0.96, 1_200_000: 0.93, 2_400_000: 0.86},
}
"""Published goodput of M learners by number of chips: the cells that are only predicted."""
PREDICTED = (8, 1_200_000, DECOUPLED[8][1_200_000])
"""Learners, chips and published goodput of the predicted cell that ``report`` shows for each candidate."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The assumptions of a model. ``return_s`` None: fitted too. ``one_stall``: shrinking and growing take equally long."""

    name: str
    during_stall: DuringStall = DuringStall.ABSORBED
    returns_join: bool = True
    one_stall: bool = True
    return_s: Duration | None = RETURN_S


CHOSEN = Candidate("chosen: one stall S, returns after 30 min")
ALTERNATIVES = (
    replace(CHOSEN, name="slices return at once", return_s=0.0),
    replace(CHOSEN, name="slices return after 60 min", return_s=3600.0),
    replace(CHOSEN, name="return time fitted", return_s=None),
    replace(CHOSEN, name="D and U separate", one_stall=False),
    replace(CHOSEN, name="D and U separate, return time fitted", one_stall=False, return_s=None),
    replace(CHOSEN, name="a return restarts a stall", returns_join=False),
    replace(CHOSEN, name="failures join a stall, slice lost", during_stall=DuringStall.JOINS),
    replace(CHOSEN, name="failures restart a stall", during_stall=DuringStall.RESTARTS),
    replace(CHOSEN, name="failures and returns restart a stall", during_stall=DuringStall.RESTARTS, returns_join=False),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted candidate. Durations are in seconds. Errors are model minus published, in percentage points, by chips."""

    candidate: Candidate
    restart: Duration
    down: Duration
    up: Duration
    return_s: Duration
    errors_no_elasticity: Mapping[int, float]
    errors_elastic: Mapping[int, float]

    @property
    def parameter_count(self) -> int:
        return 2 + (not self.candidate.one_stall) + (self.candidate.return_s is None)

    @property
    def mean_absolute_error(self) -> float:
        """The mean over all ten cells, in percentage points."""
        errors = [*self.errors_no_elasticity.values(), *self.errors_elastic.values()]
        return math.fsum(abs(error) for error in errors) / len(errors)

    def elastic(self, chips: float) -> float:
        return _elastic(self.candidate, chips, self.down, self.up, self.return_s)

    def uptime(self, learners: int, chips: int) -> float:
        rate = chips / learners / MTBI_CHIP
        rules = (self.candidate.during_stall, self.candidate.returns_join)
        return float(1.0 - (1.0 - oracles.elastic_running(rate, self.down, self.up, *rules)) ** learners)


def fit(candidate: Candidate = CHOSEN) -> Fit:
    """Fit the candidate's parameters. The two rows share none, so each is fitted alone."""

    def no_elasticity(parameters: Sequence[float], chips: int) -> float:
        return oracles.no_elasticity(chips / MTBI_CHIP, parameters[0], candidate.during_stall)

    def parts(parameters: Sequence[float]) -> tuple[Duration, Duration, Duration]:
        stalls = iter(parameters)
        down = next(stalls)
        up = down if candidate.one_stall else next(stalls)
        return down, up, 60.0 * next(stalls) if candidate.return_s is None else candidate.return_s

    def elastic(parameters: Sequence[float], chips: int) -> float:
        return _elastic(candidate, chips, *parts(parameters))

    (restart,) = least_squares(no_elasticity, NO_ELASTICITY, [60.0])
    first = [15.0] + [10.0] * (not candidate.one_stall) + [30.0] * (candidate.return_s is None)
    fitted = least_squares(elastic, ELASTIC, first)
    return Fit(
        candidate,
        restart,
        *parts(fitted),
        errors_no_elasticity={n: 100.0 * (no_elasticity([restart], n) - g) for n, g in NO_ELASTICITY.items()},
        errors_elastic={n: 100.0 * (elastic(fitted, n) - g) for n, g in ELASTIC.items()},
    )


def _elastic(candidate: Candidate, chips: float, down: Duration, up: Duration, return_s: Duration) -> float:
    away = CHIPS_PER_SLICE * return_s / MTBI_CHIP
    rules = (candidate.during_stall, candidate.returns_join)
    return oracles.elastic(chips / MTBI_CHIP, down, up, away, *rules)


def least_squares(
    model: Callable[[Sequence[float], int], float],
    cells: Mapping[int, float],
    first: Sequence[float],
    precision: float = 1e-3,
) -> list[float]:
    """Return non-negative parameters with the least sum of squared errors, by pattern search.

    Each parameter is tried one step up and down. Then all move on together in the direction that helped. If nothing helps,
    the step is halved. The method is slow but needs no derivatives, which suits three parameters and five cells.
    """

    def cost(parameters: Sequence[float]) -> float:
        return math.fsum((model(parameters, chips) - goodput) ** 2 for chips, goodput in cells.items())

    best, step = list(first), max(first) / 2.0
    least = cost(best)
    while step > precision:
        before = list(best)
        for index in range(len(best)):
            for change in (step, -step):
                tried = [max(0.0, p + change) if i == index else p for i, p in enumerate(best)]
                if (trial_cost := cost(tried)) < least:
                    best, least = tried, trial_cost
        onward = [max(0.0, 2.0 * now - then) for now, then in zip(best, before, strict=True)]
        if best == before:
            step /= 2.0
        elif (trial_cost := cost(onward)) < least:
            best, least = onward, trial_cost
    return best


def report() -> Iterator[str]:
    """Yield lines with the fit, its errors, its predictions and the results of the alternatives."""
    chosen = fit()
    yield "fitted (2 parameters, 10 cells, least squares in percentage points)"
    yield f"  R  restart without elasticity   {chosen.restart:6.1f} s"
    yield f"  S  stall to shrink or to grow   {chosen.down:6.1f} s"
    yield f"assumed: a slice has {CHIPS_PER_SLICE} chips and is away for {RETURN_S / 60:.0f} min on average"
    yield f"\n{'':30}" + "".join(f"{chips // 1000:>8}k" for chips in ELASTIC)
    rows = (
        ("no elasticity", NO_ELASTICITY, chosen.errors_no_elasticity),
        ("elastic", ELASTIC, chosen.errors_elastic),
    )
    for name, published, errors in rows:
        yield f"{name + ', published, %':30}" + "".join(f"{100 * g:9.0f}" for g in published.values())
        yield f"{'  model minus published, pp':30}" + "".join(f"{error:+9.2f}" for error in errors.values())
    yield f"mean absolute error {chosen.mean_absolute_error:.2f} pp"
    learners, chips, goodput = PREDICTED
    predicted = 100 * chosen.elastic(chips / learners)
    yield f"\npredicted, not fitted: M = {learners}, {chips:,} chips: {predicted:.1f} % (published {100 * goodput:.0f} %)"
    yield f"predicted, not fitted: M = 4, 2,400,000 chips: uptime {100 * chosen.uptime(4, 2_400_000):.2f} %"
    yield "\nplausible: 78 s to detect a failure and to restart a job of thousands of hosts from memory or a near store is"
    yield "fast but known; 13 s to drop or take in a slice while the others keep their state is the point of elasticity."
    columns = "".join(f"{name:>7}" for name in ("R", "D", "U", "T min", "MAE", "row 1", "row 2", "M=8"))
    yield f"\n{'alternatives (n parameters; R, D, U in s)':42}{'n':>3}{columns}{'uptime':>8}"
    for fitted in (chosen, *(fit(candidate) for candidate in ALTERNATIVES)):
        row_1, row_2 = (
            math.fsum(map(abs, errors.values())) / len(errors)
            for errors in (fitted.errors_no_elasticity, fitted.errors_elastic)
        )
        yield (
            f"{fitted.candidate.name:42}{fitted.parameter_count:3}{fitted.restart:7.1f}{fitted.down:7.1f}{fitted.up:7.1f}"
            f"{fitted.return_s / 60:7.0f}{fitted.mean_absolute_error:7.2f}{row_1:7.2f}{row_2:7.2f}"
            f"{100 * fitted.elastic(chips / learners):7.1f}{100 * fitted.uptime(4, 2_400_000):8.2f}"
        )


if __name__ == "__main__":
    print("\n".join(report()))
