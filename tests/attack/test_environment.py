"""No process that an installation starts has more of its starter's environment than it needs (finding 19).

The service and its second life are here; every process of a Ray cluster is in ``tests/ray/test_embedded.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.errors import ConfigurationError
from orchestrator.system.python_process import built, refuse_unset
from tests.api.installation import CONTROL, ROOT, Installation
from tests.waiting import PATIENCE_S, wait_until

SECRETS = {
    "ATOLL_TOKEN": "atoll_leaked",
    "ATOLL_ADMIN_TOKEN": "leaked",
    "AWS_SECRET_ACCESS_KEY": "leaked",
    "AWS_SESSION_TOKEN": "leaked",
    "AWS_ACCESS_KEY_ID": "leaked",
    "GOOGLE_APPLICATION_CREDENTIALS": "/leaked.json",
    "AZURE_STORAGE_CONNECTION_STRING": "leaked",
    "GITHUB_TOKEN": "leaked",
    "HF_TOKEN": "leaked",
    "WANDB_API_KEY": "leaked",
    "NVIDIA_API_KEY": "leaked",
    "NVIDIA_NGC_TOKEN": "leaked",
    "JAX_SECRET": "leaked",
    "TPU_AUTH_PASSWORD": "leaked",
    "HTTPS_PROXY": "http://me:leaked@proxy",
    "PGPASSWORD": "leaked",
    "SSH_AUTH_SOCK": "/leaked",
    "KUBECONFIG": "/leaked",
    "RAY_AUTH_TOKEN": "leaked",
    "LD_PRELOAD_OF_ANOTHER": "leaked",
    "SOMETHING_NEW": "leaked",
}
NEEDED = {
    **dict.fromkeys(("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONHASHSEED"), "x"),
    **dict.fromkeys(("LD_LIBRARY_PATH", "SSL_CERT_FILE", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"), "x"),
    **dict.fromkeys(("XLA_FLAGS", "JAX_PLATFORMS", "OMP_NUM_THREADS", "TPU_CHIPS_PER_HOST_BOUNDS"), "x"),
}

CODE = {
    **dict.fromkeys(("LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE"), "/evil"),
    **dict.fromkeys(
        ("PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS", "PYTHON_OF_A_LATER_VERSION"), "/evil"
    ),
}
"""It names code, or where code is."""
SET = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}


def test_what_is_needed_goes_on_and_nothing_else_does() -> None:
    assert built(SECRETS | NEEDED | CODE) == NEEDED | SET
    given = built(SECRETS | NEEDED, ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
    assert given == NEEDED | SET | {name: SECRETS[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}


@pytest.mark.parametrize("name", ["", "A B", "AWS_SECRET=hunter2", "-x", "A\nB", "1A"])
def test_a_name_with_a_value_is_refused_without_the_value(name: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        refuse_unset({name: "x"}, [name])
    assert "hunter2" not in str(refused.value)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Installation]:
    """By somebody whose shell is full of secrets, two of which are passed on purpose."""
    installation = Installation(tmp_path)
    options = ["--runs", str(installation.runs), "--control", CONTROL, "--pass-environment", "AWS_ACCESS_KEY_ID"]
    database = {"ATOLL_DATABASE": f"sqlite:///{tmp_path}/other.sqlite"}
    subprocess.run(
        installation.command("up", *options),
        cwd=ROOT,
        env={**os.environ, **SECRETS, **database},
        check=True,
        timeout=PATIENCE_S,
    )
    yield installation
    installation.atoll("down")


def test_the_service_and_its_second_life_have_what_they_need(started: Installation, tmp_path: Path) -> None:
    first = service_of(started)
    assert leaked(first) == {"AWS_ACCESS_KEY_ID"}
    assert first.environ()["ATOLL_DATABASE"].endswith("other.sqlite")
    again = [sys.executable, "-m", "api.installation.service_restart", str(started.home.path)]
    subprocess.run(again, cwd=ROOT, env={**os.environ, **SECRETS}, check=True, timeout=PATIENCE_S)
    wait_until(lambda: answering(started, not_by=first.pid))
    assert leaked(service_of(started)) == {"AWS_ACCESS_KEY_ID"}
    assert (tmp_path / "other.sqlite").stat().st_mode & 0o077 == 0


def service_of(installation: Installation) -> psutil.Process:
    address = installation.home.address()
    assert address is not None
    return psutil.Process(address.pid)


def answering(installation: Installation, not_by: int) -> bool:
    address = installation.home.address()
    return address is not None and address.pid != not_by and installation.home.running()


def leaked(process: psutil.Process) -> set[str]:
    return SECRETS.keys() & process.environ().keys()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://atoll:hunter2@db/atoll",
        "postgresql://db/atoll?user=a&password=hunter2",
        "postgresql://db/atoll?sslpassword=hunter2",
        "mysql://a:hunter2@[::1]:3306/x",
        "postgresql://a:hunter2@[broken/x",
    ],
)
def test_a_password_on_the_command_line_is_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    installation = Installation(tmp_path)
    said = installation.atoll("up", "--control", CONTROL, "--database", url, code=2)
    assert "ATOLL_DATABASE" in said
    assert "hunter2" not in said
    assert installation.home.address() is None


def test_the_same_goes_for_the_service_by_hand(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "api.serve", "--home", str(tmp_path), "--control", CONTROL]
    url = "postgresql://a:hunter2@db/x"
    done = subprocess.run(
        [*command, "--database", url], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 2
    assert "ATOLL_DATABASE" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_a_variable_that_says_where_code_is_cannot_be_passed() -> None:
    with pytest.raises(ConfigurationError, match="PYTHONPATH: it would change where"):
        refuse_unset({"PYTHONPATH": "/mine"}, ["PYTHONPATH"])


def test_a_name_that_is_not_set_is_refused(tmp_path: Path) -> None:
    said = Installation(tmp_path).atoll("up", "--control", CONTROL, "--pass-environment", "NOT_SET_HERE", code=2)
    assert "NOT_SET_HERE: the variable is not set" in said
