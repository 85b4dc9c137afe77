"""What a full disk leaves of a file that was to be replaced: the file as it was, and nothing beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, signal, sys
from pathlib import Path
from orchestrator.host import records
from orchestrator.system import home_files
from orchestrator.system.disk import LocalDisk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
try:
    eval(sys.argv[1])(Path(sys.argv[2]))
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize(
    "replace",
    [
        "lambda path: LocalDisk().replace(path, bytes(100))",
        "lambda path: LocalDisk().replace_held(path, bytes(100))",
        "lambda path: home_files.replace(path, 'x' * 100)",
        "lambda path: records.write_report(path.parent, {'no': 'report of ten bytes'})",
    ],
)
def test_a_file_that_cannot_be_replaced_stays_and_no_draft_does(tmp_path: Path, replace: str) -> None:
    """No file of the process may have more than ten bytes."""
    path = tmp_path / "file"
    path.write_bytes(b"before")
    program = [sys.executable, "-c", PROGRAM, replace, str(path)]
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout == "File too large\n"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"before"
