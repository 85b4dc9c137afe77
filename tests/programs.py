"""Programs of the system that tests start for real. Without one its tests are skipped visibly; in CI they fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from orchestrator.system.ports import free_port


def required(program: str) -> str:
    """Where the program is."""
    return shutil.which(program) or missing(program)


def required_file(pattern: str, program: str) -> Path:
    """Where the program is that its package keeps out of PATH: the last match of ``pattern`` below the root folder."""
    found = sorted(Path("/").glob(pattern))
    return found[-1] if found else missing(program)


def missing(program: str) -> NoReturn:
    why = f"{program} is not installed (deploy/system-packages.sh installs it)"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


@contextmanager
def seaweedfs(folder: Path) -> Iterator[tuple[str, int]]:
    """Run SeaweedFS, a real S3 server, on loopback, and give its endpoint and process. A put makes its bucket."""
    keys = {"accessKey": "key", "secretKey": "secret"}
    identity = {"name": "atoll", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    distinct: set[int] = set()
    while len(distinct) < 8:
        distinct.add(free_port())
    ports = iter(sorted(distinct))
    options = [f"-{part}={next(ports)}" for part in ("master.port", "volume.port", "filer.port", "s3.port")]
    options += [f"-{part}.port.grpc={next(ports)}" for part in ("master", "volume", "filer", "s3")]
    options += [f"-dir={folder}", f"-s3.config={folder / 's3.json'}", "-master.volumeSizeLimitMB=64"]
    weed = Path(sys.executable).with_name("weed")
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-volume.max=8", *options],
            stdout=log,
            stderr=log,
        )
    try:
        yield options[3].replace("-s3.port=", "http://127.0.0.1:"), server.pid
    finally:
        server.kill()
        server.wait()


def s3_environment(endpoint: str) -> dict[str, str]:
    """Return the variables with which atoll uses the server at this endpoint."""
    values = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "ALLOW_HTTP": "true"}
    return {f"AWS_{name}": value for name, value in values.items()}
