"""Removes from an environment what runs nothing: ``python deploy/prune_packages.py /opt/venv``.

Tests that packages ship, headers, static libraries. What another module of its package imports from a folder of tests stays
(NumPy does so). Responsible for the image's size only; whether what is left works, `make image-check` finds out.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

KEPT_TESTS = frozenset({"numpy/_core/tests/_natype.py", "numpy/_core/tests/__init__.py"})
"""Imported by ``numpy.testing``, which is no test."""
USELESS = ("*.a", "*.h", "*.hpp", "*.pxd", "*.pyx")


def main() -> None:
    (packages,) = Path(sys.argv[1]).glob("lib/python3.*/site-packages")
    freed = sum(remove_tests(packages, folder) for folder in sorted(packages.rglob("tests")) if folder.is_dir())
    for pattern in USELESS:
        for file in packages.rglob(pattern):
            freed += file.stat().st_size
            file.unlink()
    print(f"pruned {freed / 2**20:.0f} MiB from {packages}")


def remove_tests(packages: Path, folder: Path) -> int:
    """The bytes that are gone."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    gone = [file for file in files if str(file.relative_to(packages)) not in KEPT_TESTS]
    freed = sum(file.stat().st_size for file in gone)
    for file in gone:
        file.unlink()
    if len(gone) == len(files):
        shutil.rmtree(folder, ignore_errors=True)
    return freed


if __name__ == "__main__":
    main()
