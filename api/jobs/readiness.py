"""Whether the cluster answers, for whoever asks again and again: asked once for all, and never waited for long.

Responsible for one question being under way at most, however many want to know and however dead the cluster is. Its answer,
good or bad, holds for a moment; while none comes, the cluster counts as one that does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

from orchestrator.errors import AtollError, InfrastructureError
from orchestrator.threads import BoundedThreads

ANSWER_WITHIN_S = 0.7
"""What a prober waits for at most. With all around it, it is answered within a second."""
HOLDS_S = 1.0
NOT_YET = InfrastructureError(
    detail=f"The cluster has not said within {ANSWER_WITHIN_S:g} s which node groups there are.",
    remedy="Wait for it; if it stays silent, `atoll doctor` says what is wrong, and `atoll up` starts what has died.",
)


class Readiness:
    """``node_group_count`` asks the cluster, for as long as that takes."""

    def __init__(self, node_group_count: Callable[[], int]) -> None:
        self._node_group_count = node_group_count
        self._threads = BoundedThreads("the question whether the cluster answers", 1)
        self._asking = Lock()
        self._question: Future[int] | None = None
        self._answer: int | AtollError = NOT_YET
        self._answered_at = float("-inf")

    def asked(self) -> Future[int] | None:
        """The question that is under way, or None while the last answer holds."""
        with self._asking:
            if self._question and self._question.done():
                self._question = None
            if self._question is None and time.monotonic() - self._answered_at > HOLDS_S:
                self._question = self._threads.begin(self._ask)
            return self._question

    def group_count(self) -> int:
        """How many node groups there are. Raises the reason why nobody knows."""
        question = self._question
        if question and not question.done() and time.monotonic() - self._answered_at > HOLDS_S + ANSWER_WITHIN_S:
            raise NOT_YET.with_traceback(None)
        if isinstance(self._answer, AtollError):
            raise self._answer.with_traceback(None)  # it is raised again and again
        return self._answer

    def _ask(self) -> int:
        answer: int | AtollError
        try:
            answer = self._node_group_count()
        except AtollError as error:
            answer = error
        except Exception as error:
            answer = InfrastructureError(detail=f"The cluster cannot be asked: {type(error).__name__}: {error}")
        self._answer, self._answered_at = answer, time.monotonic()
        return answer if isinstance(answer, int) else 0
