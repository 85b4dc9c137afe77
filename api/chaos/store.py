"""The rows of chaos: the runs of plans, and each decision of a run, stored before it is carried out.

Responsible for rows in the database of a ``Store``. ``decide`` stores decisions before any fault: after a SIGKILL
what is stored here is all that may have been injected. One run at a time holds a job, by a constraint of the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import JSON, Engine, ForeignKey, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, mapped_column

from api.chaos.schemas import RunState
from api.storage.sessions import Sessions
from api.storage.store import Base, DuplicateKey
from orchestrator.errors import Conflict


class ChaosRunRow(Base):
    """``fleet`` is what targets are drawn from, each island as [island, node group, region, accelerators].

    ``reference`` has the figures that the verdict needs from the report of a job without faults (``loss_gap``).
    ``holds`` is the job while the run may inject faults, so that only one run does. ``ended_at`` (unix) is set once nothing
    is left to do for it; ``begun_at`` is in the job's seconds.
    """

    __tablename__ = "chaos_runs"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(unique=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.job", ondelete="CASCADE"), index=True)
    plan: Mapped[str]
    text: Mapped[str]
    fleet: Mapped[list[list[Any]]] = mapped_column(JSON)
    caller: Mapped[str]
    requested_at: Mapped[float]
    state: Mapped[str] = mapped_column(default=RunState.WAITING.value)
    reason: Mapped[str] = mapped_column(default="")
    begun_at: Mapped[float | None] = mapped_column(default=None)
    ended_at: Mapped[float | None] = mapped_column(default=None)
    reference: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    verdict: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    holds: Mapped[str | None] = mapped_column(unique=True, default=None)
    idempotency_key: Mapped[str | None] = mapped_column(unique=True, default=None)
    request_digest: Mapped[str] = mapped_column(default="")


class ChaosDecisionRow(Base):
    """The decision on the plan's fault number ``fault``; ``training`` has the islands that trained then, by incarnation.

    ``decision`` is ``Decision.plain``.
    """

    __tablename__ = "chaos_decisions"

    run: Mapped[str] = mapped_column(ForeignKey("chaos_runs.run", ondelete="CASCADE"), primary_key=True)
    fault: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    training: Mapped[dict[str, int]] = mapped_column(JSON)
    decision: Mapped[dict[str, Any]] = mapped_column(JSON)


class ChaosStore:
    """Runs and decisions. Rows handed out are detached copies."""

    def __init__(self, engine: Engine) -> None:
        self._session = Sessions(engine)

    def add(self, row: ChaosRunRow) -> None:
        """Store a new run. Raises DuplicateKey if its key was used before, Conflict while another run holds its job."""
        try:
            with self._session.begin() as session:
                session.add(row)
        except IntegrityError:
            if row.idempotency_key and (earlier := self.by_key(row.idempotency_key)):
                raise DuplicateKey(earlier) from None
            if holder := self._holder(row.job):
                detail = f"The plan {holder.plan} runs against {row.job} already ({holder.run}, {holder.state})."
                remedy = f"End it with `atoll chaos end {row.job}`, or let it come to its verdict."
                raise Conflict(detail=detail, remedy=remedy) from None
            raise

    def run(self, job: str, run: str) -> ChaosRunRow | None:
        """The job's run of this id; ``latest`` is the one asked for last."""
        query = select(ChaosRunRow).where(ChaosRunRow.job == job).order_by(ChaosRunRow.number.desc()).limit(1)
        with self._session() as session:
            return session.scalar(query if run == "latest" else query.where(ChaosRunRow.run == run))

    def runs(self, job: str) -> list[ChaosRunRow]:
        """All runs against a job, newest first."""
        query = select(ChaosRunRow).where(ChaosRunRow.job == job).order_by(ChaosRunRow.number.desc())
        with self._session() as session:
            return list(session.scalars(query))

    def unsettled(self) -> list[ChaosRunRow]:
        """The runs for which something is left to do."""
        with self._session() as session:
            return list(session.scalars(select(ChaosRunRow).where(ChaosRunRow.ended_at.is_(None))))

    def by_key(self, idempotency_key: str) -> ChaosRunRow | None:
        with self._session() as session:
            return session.scalar(select(ChaosRunRow).where(ChaosRunRow.idempotency_key == idempotency_key))

    def update(self, run: str, state: RunState, **values: Any) -> None:
        """Set the state of a run. It holds its job only while it may inject faults."""
        with self._session.begin() as session:
            row = session.scalar(select(ChaosRunRow).where(ChaosRunRow.run == run))
            if row is None:
                return  # it was removed with its job
            row.state = state.value
            row.holds = row.job if state.injects else None
            for name, value in values.items():
                setattr(row, name, value)

    def decisions(self, run: str) -> list[ChaosDecisionRow]:
        """The decisions so far, in the order of the plan's faults."""
        query = select(ChaosDecisionRow).where(ChaosDecisionRow.run == run).order_by(ChaosDecisionRow.fault)
        with self._session() as session:
            return list(session.scalars(query))

    def decide(self, rows: Sequence[ChaosDecisionRow]) -> None:
        """All of these are decided, or none is."""
        with self._session.begin() as session:
            session.add_all(rows)

    def skip(self, run: str, fault: int, reason: str) -> None:
        """A decided fault is skipped after all, for this reason."""
        with self._session.begin() as session:
            row = session.get(ChaosDecisionRow, (run, fault))
            if row is not None:
                row.decision = {**row.decision, "spared": reason}

    def _holder(self, job: str) -> ChaosRunRow | None:
        with self._session() as session:
            return session.scalar(select(ChaosRunRow).where(ChaosRunRow.holds == job))
