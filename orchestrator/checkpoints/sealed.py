"""Sealed documents: canonical JSON behind the digest of exactly these bytes, so that damage is always detected.

    {"digest":"…","document":{…}}\\n

Every byte counts: a file is accepted only if writing what was read gives the same bytes again, so that a bit flipped
anywhere, in a space or in the digest itself, is found. Refuses to know what documents mean, and files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from orchestrator.errors import DataError


def seal(document: Mapping[str, Any]) -> bytes:
    """The document as the bytes of a file. It holds plain data: mappings by strings, lists, strings, numbers."""
    return json.dumps({"digest": digest_of(document), "document": document}, **_CANONICAL).encode() + b"\n"


def digest_of(document: Mapping[str, Any]) -> str:
    """Names the document."""
    return blake2b(json.dumps(document, **_CANONICAL).encode(), digest_size=16).hexdigest()


def unseal(content: bytes, name: str) -> dict[str, Any]:
    """The document. Raises DataError, naming ``name``, for anything but the bytes that ``seal`` made."""
    try:
        sealed = json.loads(content)
        document = sealed["document"]
        same = seal(document) == content
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(detail=f"{name} is damaged: it cannot be read ({type(error).__name__}).") from error
    if not same or not isinstance(document, dict):
        raise DataError(detail=f"{name} is damaged: its bytes are not those its digest was made of.")
    return document


_CANONICAL: dict[str, Any] = {"sort_keys": True, "separators": (",", ":"), "allow_nan": False}
