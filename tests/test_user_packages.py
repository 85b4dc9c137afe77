"""Packages of jobs in a folder that the operator names: found after everything else, and in the place of nothing."""

from __future__ import annotations

import os
import subprocess
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from orchestrator.errors import ConfigurationError
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.ray_start import give_packages, packages_of
from orchestrator.system import python_process, user_packages


def module(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return path


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("queue.py", r"'queue' \(of Python's library\)"),
        ("secrets/__init__.py", "'secrets'"),
        ("api/__init__.py", "'api'"),
        ("learners/part.py", "'learners'"),
        ("orchestrator.py", "'orchestrator'"),
        ("ray.py", "'ray'"),
        (f"numpy{EXTENSION_SUFFIXES[0]}", "'numpy'"),
    ],
)
def test_a_folder_that_clashes_is_refused_by_name(file: str, named: str, tmp_path: Path) -> None:
    module(tmp_path / file)
    with pytest.raises(ConfigurationError, match=rf"{tmp_path}: .*{named}.*Rename"):
        user_packages.resolved([str(tmp_path)])


def test_two_folders_with_one_name_are_refused(tmp_path: Path) -> None:
    module(tmp_path / "one" / "mymodels.py")
    module(tmp_path / "two" / "mymodels" / "__init__.py")
    with pytest.raises(ConfigurationError, match=r"two: 'mymodels' \(of .*one"):
        user_packages.resolved([f"{tmp_path}/one", f"{tmp_path}/two"])


def test_what_is_no_module_clashes_with_nothing(tmp_path: Path) -> None:
    for name in ("json/data.txt", "docs/index.md", "re.txt", "not-a-name.py"):
        module(tmp_path / name)
    assert user_packages.resolved([str(tmp_path)]) == (str(tmp_path.resolve()),)


def test_unfit_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        user_packages.resolved([f"{tmp_path}/missing"])
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigurationError, match="does not exist"):
        user_packages.resolved([f"{tmp_path}/loop"])
    with pytest.raises(ConfigurationError, match="is empty"):
        user_packages.resolved([""])
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigurationError, match="writable by all users"):
        user_packages.resolved([str(tmp_path)])


def test_a_relative_folder_and_a_link_become_the_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert user_packages.resolved(["link", "real"]) == (str((tmp_path / "real").resolve()),)


def test_its_packages_come_last(tmp_path: Path) -> None:
    """Also where a name has come into the folder since it was looked at."""
    module(tmp_path / "mymodels.py").write_text("import queue; print(queue.__file__)")
    module(tmp_path / "queue.py").write_text("raise SystemExit('shadowed')")
    code = (
        "from orchestrator.system import user_packages as p; p.put_on_path(); p.put_on_path(); import mymodels, sys; "
    )
    code += "print(sys.path.count(sys.path[-1]), sys.path[-1])"
    environment = python_process.cleaned(os.environ) | user_packages.variables([str(tmp_path)])
    done = subprocess.run(python_process.code(code), env=environment, capture_output=True, text=True, check=True)
    library, last = done.stdout.splitlines()
    assert not library.startswith(str(tmp_path))
    assert last == f"1 {tmp_path}"


def test_a_package_is_there_without_being_run(tmp_path: Path) -> None:
    module(tmp_path / "mymodels.py").write_text("raise SystemExit('run')")
    assert user_packages.is_there("mymodels.part", [str(tmp_path)])
    assert not user_packages.is_there("mymodels", [])


def test_a_cluster_remembers_its_folders_for_nodes_that_start_later(tmp_path: Path) -> None:
    cluster = ClusterFile("of this test", "127.0.0.1:1", str(tmp_path), {})
    assert packages_of(cluster) == ()
    assert give_packages(cluster, ["/one"])
    assert not give_packages(cluster, [])
    assert give_packages(cluster, ["/two", "/one"])
    assert packages_of(cluster) == ("/one", "/two")
