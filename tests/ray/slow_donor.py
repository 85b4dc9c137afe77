"""A synthetic island whose state takes seconds to be handed over, so that a donor can be caught in the act."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from learners.contract import Arrays, HostCopy
from learners.synthetic import SyntheticTrainer

HANDING_OVER_S = 2.0


def create(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    return SlowDonor(spec, shard_index)


class SlowCopy(HostCopy):
    def arrays(self) -> Arrays:
        time.sleep(HANDING_OVER_S)
        return super().arrays()


class SlowDonor(SyntheticTrainer):
    def export_state(self, tensors: Iterable[str] | None = None) -> HostCopy:
        return SlowCopy(super().export_state(tensors).arrays())
