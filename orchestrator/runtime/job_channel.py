"""The synchroniser's side of a job's channel: the authority of its certificates, and the end at which the shard's bytes are.

Authority and secrets live in this process alone and die with it. A synchroniser that takes the place of a dead one makes its
own, and every process that it listens to becomes a member anew (``ParameterLink``): nothing is on a disk that somebody could
read, and who still holds the dead one's certificates is trusted by nobody.
"""

from __future__ import annotations

from orchestrator.channel.certificates import JobAuthority
from orchestrator.channel.endpoint import Endpoint, Membership, Terms, encrypts, rank_subject
from orchestrator.channel.ticket import SHARD
from orchestrator.core.vocabulary import Life
from orchestrator.host.job_context import JobContext
from orchestrator.runtime import cluster


class JobChannel:
    """Until ``close``."""

    def __init__(self, context: JobContext) -> None:
        host = cluster.own_address()
        self._context = context
        self._terms = Terms(**context.spec.transport.model_dump())
        self._authority = JobAuthority.new(context.job) if encrypts(self._terms, host) else None
        self.endpoint = Endpoint(self._membership(SHARD), host)

    def membership(self, process: Life, rank: int = 0) -> Membership:
        """Of an island's process, by the life that it began as."""
        island, incarnation = process
        return self._membership(rank_subject(f"{island}:{incarnation}", rank))

    def evaluator_membership(self, number: int) -> Membership:
        """Of the job's evaluator with this number."""
        return self._membership(f"evaluator {number}")

    def close(self) -> None:
        self.endpoint.close()

    def _membership(self, subject: str) -> Membership:
        identity = self._authority.issue(subject) if self._authority is not None else None
        return Membership(self._context.job, subject, self._context.epoch, self._terms, identity)
