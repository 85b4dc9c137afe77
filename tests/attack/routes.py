"""The routes of the service's app, without a service."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from api.app import create_app
from api.storage.store import Store
from tests.api.clockwork import Clockwork


@cache
def app() -> FastAPI:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{folder}/service.sqlite")
        made = create_app(Clockwork(Path(folder) / "clockwork"), store, Path(folder) / "runs")
        store.close()
        return made


def routes_of() -> list[APIRoute]:
    """Every route that is ours; the framework's own is that of the document."""
    return list(_walk(app()))


def _walk(router: FastAPI | APIRouter) -> Iterator[APIRoute]:
    for route in router.routes:
        if included := getattr(route, "original_router", None):
            yield from _walk(included)
        elif isinstance(route, APIRoute):
            yield route
