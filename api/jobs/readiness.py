"""The readiness probe: one question to the cluster at a time, shared by all who probe, and never waited for long.

Responsible for one question being under way at most, however many want to know and however dead the cluster is. While no
answer comes, the cluster counts as one that does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

from orchestrator.errors import AtollError, InfrastructureError
from orchestrator.threads import BoundedThreads

ANSWER_WITHIN_S = 0.7
"""The longest wait of one probe, so that with all around it, it is answered within a second."""
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

    def question(self) -> Future[int]:
        """The request to the cluster that is under way, or one that begins now."""
        with self._asking:
            if self._question is None or self._question.done():
                self._question = self._threads.begin(self._ask)
            return self._question

    def _ask(self) -> int:
        try:
            return self._node_group_count()
        except AtollError:
            raise
        except Exception as error:
            raise InfrastructureError(detail=f"The cluster cannot be asked: {type(error).__name__}: {error}") from error


def group_count(question: Future[int]) -> int:
    """The number of node groups. Raises the reason why nobody knows it."""
    if not question.done():
        raise NOT_YET.with_traceback(None)
    if error := question.exception():
        raise error.with_traceback(None)  # it is raised for everybody who asked
    return question.result()
