"""Tokens, and the audit trail. For admins."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from api.auth.permissions import Role, role_of
from api.auth.tokens import AccessStore, TokenRow, Tokens
from api.http.pools import ACCESS, runs_in
from api.routes.dependencies import ANONYMOUS, Caller
from api.schemas import AuditEntry, AuditTrail, NewToken, Token, TokenList

router = APIRouter(prefix="/v1", tags=["access"], route_class=runs_in(ACCESS))


async def tokens_of(request: Request) -> Tokens:
    tokens: Tokens = request.app.state.tokens
    return tokens


async def access_of(request: Request) -> AccessStore:
    access: AccessStore = request.app.state.access
    return access


TokensHere = Annotated[Tokens, Depends(tokens_of)]
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


@router.post("/tokens", status_code=201)
def create_token(options: TokenOptions, tokens: TokensHere, caller: Caller = ANONYMOUS) -> NewToken:
    """Create a token. Its secret is only in this answer; if it is lost, revoke the token and create another."""
    row, raw = tokens.create(options.name, options.role, caller, options.expires_in_s)
    return NewToken(**token_of(row, tokens).model_dump(), token=raw)


@router.get("/tokens")
def list_tokens(tokens: TokensHere) -> TokenList:
    """List all tokens, also revoked and expired ones, oldest first."""
    return TokenList(tokens=[token_of(row, tokens) for row in tokens.list()])


@router.post("/tokens/{name}/revoke")
def revoke_token(name: str, tokens: TokensHere) -> Token:
    """Revoke a token. Idempotent."""
    return token_of(tokens.revoke(name), tokens)


@router.get("/audit")
def list_audit(
    access: Annotated[AccessStore, Depends(access_of)],
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[
        str | None, Query(pattern=r"^[0-9]{1,18}$", description="`next_cursor` of the previous page")
    ] = None,
) -> AuditTrail:
    """List the changing requests that carried a valid token, newest first."""
    rows = access.audit(limit, int(cursor) if cursor else None)
    fields = AuditEntry.model_fields
    documents = ({field: getattr(row, field) for field in fields} | {"role": role_of(row.role)} for row in rows)
    entries = [AuditEntry.model_validate(entry) for entry in documents]
    return AuditTrail(entries=entries, next_cursor=str(rows[-1].number) if len(rows) == limit else None)


def token_of(row: TokenRow, tokens: Tokens) -> Token:
    return Token(
        name=row.name,
        role=role_of(row.role),
        created_at=row.created_at,
        created_by=row.created_by,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        valid=tokens.valid(row),
    )
