"""The roles that a model gives its tensors are in a checkpoint: a job that is resumed merges as the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import Manifest, from_document, unseal
from orchestrator.checkpoints.reading import manifest_of, outer_states
from orchestrator.checkpoints.writing import cut_of, write_manifest
from orchestrator.core.vocabulary import FragmentId
from orchestrator.errors import DataError
from orchestrator.parameters.outer_optimizer import Sgd
from orchestrator.parameters.outer_state import Averaging, OuterState, OuterStep
from orchestrator.parameters.pieces import Role
from orchestrator.system.roots import EVERYTHING

ROLES = {"table": Role(embedding=True), "layers": Role(stacked_axes=1, decays=False)}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A checkpoint of one fragment, which no island is part of."""
    arrays = {"table": np.ones((4, 2), np.float32), "layers": np.ones((3, 2, 2), np.float32)}
    outer = OuterState(arrays, (tuple(arrays),), OuterStep(Averaging.RADIAL, Sgd(1.0)), ROLES)
    cut = cut_of({FragmentId(0): (outer.state(FragmentId(0)), 7)})
    folder = Folder.within(EVERYTHING, str(tmp_path))
    facts: dict[str, Any] = {
        "tokens_trained": 0,
        "merged_tokens": (0,),
        "cursors": (0,),
        "batch_sizes": (1,),
        "legs": (),
        "parts": (),
    }
    write_manifest(folder, Manifest("job-1", 1, 1.0, 1e9, {}, cut.fragments, files=cut.write(folder), **facts))
    return folder


def test_roles_come_back_with_the_fragment(folder: Folder) -> None:
    (state,) = outer_states(folder, manifest_of(folder))
    assert state.roles == ROLES


def test_a_checkpoint_of_an_older_build_has_none(folder: Folder) -> None:
    document = unseal(folder.read("manifest.json", 1 << 20), "it")
    del document["fragments"][0]["roles"]
    assert from_document(document, "it").fragments[0].roles == ()


@pytest.mark.parametrize(
    "row", [["table", 1, 0, True], ["table", True, -1, True], ["table"], "table", [1, True, 0, True]]
)
def test_what_is_no_role_is_refused(folder: Folder, row: Any) -> None:
    document = unseal(folder.read("manifest.json", 1 << 20), "it")
    document["fragments"][0]["roles"] = [row]
    with pytest.raises(DataError, match="roles"):
        from_document(document, "it")
