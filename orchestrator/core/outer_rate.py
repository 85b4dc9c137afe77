"""The outer learning rate of a merge, as a part of what the job specification says: warm-up, then a line down.

    ratio = min(1, version / W) · (1 − (1 − f) · min(1, T / budget))

W is in merges of one fragment, T is what all islands have trained. Decided where the merge is ordered, and carried in the
order and in the journal: whoever takes the merge again steps at the same rate. By tokens, so that a job whose islands are
away for a time, or that is taken back to a checkpoint, is where its budget is; not by a clock. Only sums and quotients, so
that every machine has the same bits.
"""

from __future__ import annotations

from orchestrator.core.vocabulary import OuterRatePolicy, Version


def outer_lr_ratio(policy: OuterRatePolicy, version: Version, tokens_trained: int, token_budget: int) -> float:
    """Of the merge that makes ``version``, decided when ``tokens_trained`` of the budget were; in [0, 1]."""
    warm = min(1.0, version / policy.warmup_merges) if policy.warmup_merges else 1.0
    if policy.final_ratio == 1.0:
        return warm
    return warm * (1 - (1 - policy.final_ratio) * min(1.0, tokens_trained / token_budget))
