"""The module of the guide's page as an installed package."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from tests.learners.pytorch.small_models import MODULE  # may skip

    module = ModuleType("mine")
    exec(compile(MODULE, "pytorch.md", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "mine", module)
    return module
