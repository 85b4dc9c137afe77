"""A folder whose every file would take a module's place, and says so by a canary when any of it runs."""

from __future__ import annotations

import importlib.metadata
import os
import site
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

ATOLL = Path(sys.executable).with_name("atoll")
OURS = ("api", "learners", "orchestrator", "sitecustomize", "usercustomize", "emoji", "tests")


class HostileFolder:
    """The working folder, PYTHONPATH, PYTHONSTARTUP and user site of a command, all with modules that must not run."""

    def __init__(self, folder: Path) -> None:
        self.canary, self.path = folder / "canary", folder / "work"
        base = folder / "user"
        user_site = base / Path(site.getusersitepackages()).relative_to(site.getuserbase())
        self.path.mkdir()
        user_site.mkdir(parents=True)
        installed = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
        code = f"import sys\nopen({str(self.canary)!r}, 'a').write(__file__ + ' of ' + ' '.join(sys.argv) + chr(10))\n"
        for name in sorted({*sys.stdlib_module_names, *OURS, *installed}):
            (self.path / f"{name}.py").write_text(code)
        for name in ("api", "learners", "orchestrator", "tests"):  # a package comes before a module of its name
            (self.path / name).mkdir()
            (self.path / name / "__init__.py").write_text(code)
        for place in (user_site, folder / "home"):
            place.mkdir(exist_ok=True)
            (place / "usercustomize.py").write_text(code)
            (place / "evil.pth").write_text(f"import sys; open({str(self.canary)!r}, 'a').write('pth')\n")
        (base / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix, 'bin')}\n")  # an environment with that site
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(self.path),
            "PYTHONUSERBASE": str(base),
            "PYTHONSTARTUP": str(self.path / "queue.py"),
            "PYTHONPYCACHEPREFIX": str(self.path),
            "PYTHONINSPECT": "1",
            "PYTHONEXECUTABLE": str(base / "bin" / "python3"),
            "PYTHONBREAKPOINT": "queue.anything",
            "PYTHONWARNINGS": "error::queue.Anything",
            "COLUMNS": "160",
            "NO_COLOR": "1",
        }

    def atoll(self, *arguments: str, code: int | None = 0, program: Path = ATOLL) -> str:
        """What the installed program prints here. Nothing of this folder has run."""
        done = subprocess.run(
            [program, *arguments],
            cwd=self.path,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert self.executed() == "", arguments
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done.stdout + done.stderr

    def executed(self) -> str:
        return self.canary.read_text() if self.canary.exists() else ""
