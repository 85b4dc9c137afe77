"""The files that come with atoll: sample jobs, node groups, chaos plans. In a checkout they lie in ``deploy``.

An installed wheel has them in the package itself (``pyproject.toml``, force-include): who runs that has no checkout.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = _PACKAGE / "deploy" if (_PACKAGE / "deploy").is_dir() else _PACKAGE.parent / "deploy"
CONFIGS = FOLDER / "configs"
PLANS = FOLDER / "plans"
