"""Arrays of an island as builds before ``learners.plain_arrays`` wrote them: by Orbax, each whole, from one process.

They are read by TensorStore, which Orbax writes with: Orbax itself would have all processes of an island meet. An array is
one chunk, so all of it is in memory for a moment, whatever window of it is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from learners.contract import Arrays
from learners.plain_arrays import require_same_names
from orchestrator.checkpoints.blocks import Window
from orchestrator.errors import DataError, first_line
from orchestrator.parameters.parts import index_of, whole

_OUTLINE = "/.zarray"


def read(path: Path, wanted: Mapping[str, Window] | None) -> Arrays:
    """What is wanted of the arrays in this folder, one after another; None: all. Raises DataError as ``plain_arrays``."""
    import tensorstore  # which few ever need

    store = {"driver": "ocdbt", "base": f"file://{path.resolve()}"}
    try:
        keys = tensorstore.KvStore.open(store).result().list().result()
        names = [key.decode().removesuffix(_OUTLINE) for key in keys if key.endswith(_OUTLINE.encode())]
        arrays = {
            name: tensorstore.open({"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}}, read=True).result()
            for name in names
        }
        if wanted is not None:
            require_same_names(wanted, arrays, str(path))
        return {name: _window(name, array, wanted, path) for name, array in arrays.items()}
    except ValueError as error:
        raise DataError(detail=f"{path} is no folder of arrays: {first_line(error)}.") from error


def _window(name: str, array: Any, wanted: Mapping[str, Window] | None, path: Path) -> np.ndarray:
    shape = tuple(map(int, array.shape))
    window = Window(whole(shape)) if wanted is None else wanted[name]
    window.require_of(name, shape, str(path))
    if not shape:
        return np.asarray(array.read().result())
    return np.asarray(array[index_of(window.bounds)].read().result())
