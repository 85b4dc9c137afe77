"""Whoever installs a wheel has all of it: commands, page, migrations, sample jobs and plans, and what the image starts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import httpx
import psutil
import pytest

from api.installation.home import Home
from api.routes.page import FOLDER
from tests.api.installation import CONTROL, ROOT
from tests.waiting import PATIENCE_S

BUILD = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"


class Installed:
    """A wheel of this checkout in an environment of its own; what it needs, and ``tests``, are found after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "environment", symlinks=True)
        self.programs = folder / "environment" / "bin"
        (self.packages,) = folder.glob("environment/lib/python*/site-packages")
        wheel = self._checked([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT).split()[-1]
        with zipfile.ZipFile(folder / wheel) as archive:
            self.contents = archive.namelist()
            archive.extractall(self.packages)
        for script in self.packages.glob("*.data/scripts/*"):
            shutil.copyfile(script, self.programs / script.name)
            (self.programs / script.name).chmod(0o755)
        # an editable install's own file there is not read: only the environment's own folder has such files
        needed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(ROOT)]
        (self.packages / "needed.pth").write_text("\n".join(needed))

    def python(self, *arguments: str) -> str:
        return self._checked([str(self.programs / "python"), *arguments], cwd=self.folder)

    def atoll(self, *arguments: str) -> str:
        return self._checked([str(self.programs / "atoll"), *arguments], cwd=self.folder)

    @staticmethod
    def _checked(command: list[str], **how: object) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_it_is_the_wheels_own_code_that_runs(installed: Installed) -> None:
    found = installed.python("-P", "-c", "import api, orchestrator, learners; print(api, orchestrator, learners)")
    assert found.count(str(installed.packages)) == 3


def test_a_wheel_holds_the_product_and_no_tests(installed: Installed) -> None:
    folders = {name.split("/")[0] for name in installed.contents if ".dist-info/" not in name and ".data/" not in name}
    assert folders == {"api", "learners", "orchestrator"}


def test_the_page_is_in_the_wheel(installed: Installed) -> None:
    assert {f"api/web/{path.name}" for path in FOLDER.iterdir()} <= set(installed.contents)


def test_the_service_comes_up_with_page_tables_groups_and_plans(installed: Installed) -> None:
    home = installed.folder / "home"
    where = ("--home", str(home))
    installed.atoll("up", *where, "--control", CONTROL, "--runs", str(installed.folder / "runs"))
    try:
        address = Home(home).address()
        assert address is not None
        page = httpx.get(address.url)
        assert page.status_code == 200
        for name in [part.split('"')[0] for part in page.text.split('src="')[1:]]:
            assert httpx.get(f"{address.url}/{name.lstrip('/')}").status_code == 200, name
        service = psutil.Process(address.pid)
        assert Path(service.cmdline()[0]).parent == installed.programs
        plans = installed.atoll("chaos", "list")
        assert all(plan.stem in plans for plan in (ROOT / "deploy" / "plans").glob("*.yaml"))
        sample = installed.packages / "api" / "deploy" / "configs" / "demo.yaml"
        job = json.loads(installed.atoll("submit", str(sample), "--json", *where))
        assert job["island_count"] >= 4
    finally:
        installed.atoll("down", *where)


def test_manifests_have_the_alerts_and_dashboards_that_the_wheel_holds(installed: Installed) -> None:
    printed = installed.atoll("kubernetes", "render", str(ROOT / "deploy" / "kubernetes" / "gpu-spot.yaml"))
    kinds = re.findall(r'^kind: "(\w+)"', printed, re.MULTILINE)
    assert kinds.count("ConfigMap") == len(list((ROOT / "dashboards").glob("*.json"))) > 3
    assert "AtollJobSilent" in printed


def test_the_program_of_the_image_starts_beside_it(installed: Installed) -> None:
    program = installed.folder / "node.py"
    program.write_text((ROOT / "deploy" / "node.py").read_text())
    assert "--region" in installed.python("-I", str(program), "island", "--help")
