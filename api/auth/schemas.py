"""The shapes of tokens and of the audit trail, as the REST API says them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from api.auth.roles import Role
from api.schemas import Answer

EXPIRY_MAX_S = 10 * 365 * 86400.0

TokenName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$", examples=["ci"])]


class TokenOptions(BaseModel):
    """A token to create. Its name identifies it on tapes and in the audit trail."""

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
            description="seconds from now until it expires; null: never",
            examples=[2592000.0],
        ),
    ] = None


class Token(Answer):
    """A token, without its secret. ``valid`` is false once it expired or was revoked. Times are Unix seconds.

    ``role`` is null if its row is damaged; the token is then invalid.
    """

    name: str
    role: Role | None
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None
    valid: bool


class NewToken(Token):
    """A token that was just created. ``token`` is the secret to send; it is shown only once and not stored."""

    token: str


class TokenList(Answer):
    tokens: list[Token]


class AuditEntry(Answer):
    """One changing request: caller, role, method, path, time and status.

    ``status`` is null until the request is answered, and stays null if the service was killed before. ``role`` is null if
    its row is damaged.
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
    next_cursor: Annotated[str | None, Field(description="pass it as `cursor` to get the next page; null: no more")]
