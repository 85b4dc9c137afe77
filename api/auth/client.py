"""The part of ``api.client.Client`` that is about tokens and the audit trail."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from api.auth.roles import Role
from api.auth.schemas import AuditTrail, NewToken, Token, TokenList


class AccessRequests:
    """Needs the requests of a client."""

    _get: Any
    _post: Any

    def tokens(self) -> list[Token]:
        """Those that were given, and not forgotten; what they are cannot be had again."""
        listed: TokenList = self._get("/v1/tokens", TokenList)
        return listed.tokens

    def create_token(self, name: str, role: Role, *, expires_in_s: float | None = None) -> NewToken:
        """A new token; its ``token`` cannot be had again. Raises Conflict if the name was given before."""
        body = {"name": name, "role": role, "expires_in_s": expires_in_s}
        token: NewToken = self._post("/v1/tokens", NewToken, body)
        return token

    def revoke_token(self, name: str) -> Token:
        """It opens nothing any more. Raises NotFound if there is none of that name."""
        token: Token = self._post(f"/v1/tokens/{quote(name, safe='')}/revoke", Token)
        return token

    def audit(self, *, limit: int = 100, cursor: str | None = None) -> AuditTrail:
        """One page of what was changed by whom, newest first; ``cursor`` is the ``next_cursor`` of the page before."""
        trail: AuditTrail = self._get("/v1/audit", AuditTrail, {"limit": limit, "cursor": cursor})
        return trail
