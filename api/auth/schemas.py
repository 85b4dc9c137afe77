"""The shapes of tokens and of the audit trail, as the REST API says them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from api.auth.roles import Role
from api.schemas import Answer

EXPIRY_MAX_S = 10 * 365 * 86400.0

TokenName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$", examples=["ci"])]


class TokenOptions(BaseModel):
    """A token to be made. Its name stands on the tape and in the audit trail for whatever it does."""

    model_config = ConfigDict(extra="forbid")

    name: TokenName
    role: Annotated[Role, Field(examples=["operator"])]
    expires_in_s: Annotated[
        float | None,
        Field(
            strict=True,
            ge=0.001,
            le=EXPIRY_MAX_S,
            allow_inf_nan=False,
            description="seconds from now; null: never",
            examples=[2592000.0],
        ),
    ] = None


class Token(Answer):
    """A token, without what makes it one. ``valid`` is false once it expired or was revoked. Times are Unix seconds.

    ``role`` is null where what is stored of it is damaged; it is not valid then.
    """

    name: str
    role: Role | None
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None
    valid: bool


class NewToken(Token):
    """A token that was just made. ``token`` is what to send; it is shown this once and kept nowhere."""

    token: str


class TokenList(Answer):
    tokens: list[Token]


class AuditEntry(Answer):
    """One request to change something: who, with which role, what, when, and how it was answered.

    ``status`` is null while it is being answered, and for ever if the service was killed meanwhile. ``role`` is null where
    what is stored of it is damaged.
    """

    number: int
    at: float
    caller: str
    role: Role | None
    address: str
    method: str
    path: str
    status: int | None


class AuditTrail(Answer):
    entries: list[AuditEntry]
    next_cursor: Annotated[str | None, Field(description="give it as `cursor` for the next page; null: no more")]
