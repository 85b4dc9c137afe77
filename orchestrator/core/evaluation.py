"""Evaluations: when Θ is measured on the held-out split, for how long at most, and on which island if islands do it.

    none yet, or so many merges since ──▶ OPEN ──measured, or failed──▶ (none open)
                                           │ its island is gone, silent, or failed
                                           └──▶ OPEN on another island; beside them if there is none, or if one failed

There is one at a time. While it is open, merges continue and are counted, and the next evaluation begins with the first
merge after it. Its limit is a share of the time that the merges between two evaluations took lately; if not all sequences
fit, fewer are measured. The first and the last evaluation of a job have no limit: jobs are compared by the last one, and
the first one says what training began with. The first one measures Θ as it was seeded, at version 0 or at that of the
checkpoint that the job continues, while the islands start; if islands measure, the first that trains does.

The island that is furthest ahead measures, because others wait for it least. Its clock stands still meanwhile, so next time
it is another. This module knows no models, no processes, and no place where Θ is measured if not on an island.
"""

from __future__ import annotations

from orchestrator.core.effects import Effect, Evaluate
from orchestrator.core.events import EvaluationCompleted, EvaluationFailed, OuterStateSeeded
from orchestrator.core.state import JobState, OpenEvaluation
from orchestrator.core.vocabulary import NO_INCARNATION, Duration, Instant, IslandState, JobPhase, Life


def seeded(state: JobState, event: OuterStateSeeded) -> list[Effect]:
    """Note that merges may come from now on. A repeated event changes nothing."""
    if not state.seeded:
        state.evaluated_at = event.at
    return []


def after_merge(state: JobState, now: Instant) -> list[Effect]:
    """Begin an evaluation if one is due and none is open."""
    state.merges_since_evaluation += 1
    every = state.policy.evaluation_every_merges
    if not every or state.merges_since_evaluation < every or state.evaluation is not None:
        return []
    return [begin(state, now)]


def begin(state: JobState, now: Instant) -> Evaluate:
    """Begin an evaluation of the present Θ."""
    limit_s = _limit_s(state, now)
    state.merges_since_evaluation, state.evaluated_at = 0, now
    return _open(state, limit_s)


def begin_anew(state: JobState, before: OpenEvaluation) -> Evaluate:
    """Replace the open evaluation, which has no result, by one of the present Θ within the same limit."""
    return _open(state, before.limit_s)


def answered(state: JobState, event: EvaluationCompleted | EvaluationFailed) -> list[Effect]:
    """Close the evaluation. A failed one is closed as well, because training does not depend on it; a failure on an island
    is repeated beside the islands.
    """
    opened = state.evaluation
    if opened is None or event.global_version != opened.global_version:
        return []
    if isinstance(event, EvaluationFailed) and opened.evaluator is not None:
        return [_opened(state, opened.limit_s, None)]
    state.evaluation = None
    if opened.limit_s is None or _is_whole(state, event):
        state.evaluated = event.global_version
    return []


def settle(state: JobState) -> list[Effect]:
    """Begin the first evaluation, and replace an island that measures but is gone or silent. Called after every event."""
    opened = state.evaluation
    if opened is None:
        return [_open(state, None)] if _first_is_due(state) else []
    if opened.evaluator is None or state.phase is JobPhase.FINISHED:
        return []
    return [] if _answers(state, opened.evaluator) else [begin_anew(state, opened)]


def _first_is_due(state: JobState) -> bool:
    """Return whether the first evaluation is due. No merge can come before it, because merges need an island that trains."""
    policy = state.policy.evaluation
    if not policy.at_start or not state.seeded or state.evaluated is not None or state.phase is not JobPhase.RUNNING:
        return False
    return state.merges_since_evaluation == 0 and (not policy.on_islands or _furthest(state) is not None)


def _open(state: JobState, limit_s: Duration | None) -> Evaluate:
    return _opened(state, limit_s, _furthest(state) if state.policy.evaluation.on_islands else None)


def _opened(state: JobState, limit_s: Duration | None, evaluator: Life | None) -> Evaluate:
    state.evaluation = OpenEvaluation(state.global_version, limit_s, evaluator)
    island, incarnation = evaluator or (None, NO_INCARNATION)
    versions = tuple(current.version for current in state.rounds)
    return Evaluate(state.global_version, limit_s, island, incarnation, versions if evaluator else ())


def _limit_s(state: JobState, now: Instant) -> Duration | None:
    """Return the time limit, or None if the job ends or evaluates only at its end."""
    policy = state.policy
    ratio, every = policy.evaluation.time_ratio_max, policy.evaluation_every_merges
    if ratio is None or not every or state.phase is not JobPhase.RUNNING:
        return None
    return ratio * every * (now - state.evaluated_at) / max(1, state.merges_since_evaluation)


def _furthest(state: JobState) -> Life | None:
    """Return the island that is furthest ahead. Flushed islands count: they step no more, and hold Θ."""
    islands = [i for i in state.islands.values() if i.id not in state.standbys and i.state is IslandState.TRAINING]
    if not islands:
        return None
    furthest = min(islands, key=lambda island: (-state.step_of(island), island.id))
    return furthest.id, furthest.incarnation


def _answers(state: JobState, life: Life) -> bool:
    island = state.islands[life[0]]
    return island.incarnation == life[1] and island.state is IslandState.TRAINING


def _is_whole(state: JobState, event: EvaluationCompleted | EvaluationFailed) -> bool:
    """Return whether the evaluation need not be repeated: it measured all sequences, or failed and would fail again."""
    return isinstance(event, EvaluationFailed) or event.sequence_count >= state.policy.evaluation.sequences
