"""Plain data as JSON can say it: what answers, files and tables of every package are made of. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """The same data with what is no number (NaN, infinities) as None, tuples as lists, keys as strings."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
