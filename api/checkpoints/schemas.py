"""The shapes of checkpoints in answers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from api.schemas import Answer


class Checkpoint(Answer):
    """One whole checkpoint of a job. ``url`` is what ``resume.checkpoint`` of a specification takes."""

    number: int
    url: str
    taken_at: float = Field(description="Unix seconds")
    after_s: float = Field(description="seconds since the job was created")
    global_version: int
    tokens_trained: int
    islands: list[str] = Field(description="whose state it holds")
    bytes: int


class RollbackOptions(BaseModel):
    """``checkpoint`` is the number of one that the job keeps; without it, the newest."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: int | None = Field(default=None, strict=True, ge=1, le=2**31 - 1)


class Checkpoints(Answer):
    checkpoints: list[Checkpoint]
