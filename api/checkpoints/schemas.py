"""The shapes of checkpoints in answers."""

from __future__ import annotations

from pydantic import Field

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


class Checkpoints(Answer):
    checkpoints: list[Checkpoint]
