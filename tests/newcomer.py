"""Somebody at a shell, who types what documents say: a folder like a fresh checkout, and the shell's answers.

What differs from a newcomer's is around the words: home and runs are the test's own, curl's own settings lead the documents'
port to the one that was free, and a shell may have `atoll` forked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from api.client import Client
from api.installation.home import DATABASE_VARIABLE, DEFAULT_HOME, TOKEN_VARIABLE, Home
from tests import forked
from tests.documents import ROOT
from tests.waiting import PATIENCE_S

PORT = 8470
"""The documents'."""
MARK = "-- exit code "


class Newcomer:
    """Somebody at a shell in a fresh checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Home(folder / DEFAULT_HOME)
        (folder / ".venv").symlink_to(Path(sys.prefix))
        shutil.copytree(ROOT / "deploy", folder / "deploy")
        secrets = {TOKEN_VARIABLE, DATABASE_VARIABLE}
        self._environment = {name: value for name, value in os.environ.items() if name not in secrets}
        ours = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._environment |= {"PYTHONPATH": ours, "CURL_HOME": str(folder), "COLUMNS": "160", "no_proxy": "127.0.0.1"}
        self._shell = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, command: str) -> str:
        """What the command printed. It must have succeeded."""
        code, said = self.attempt(command)
        assert code == 0, f"$ {command}\n{said}\nexit code {code}"
        return said

    def attempt(self, command: str) -> tuple[int, str]:
        """The command's exit code, and what it printed."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{{ {command}\n}} </dev/null\nprintf '\\n{MARK}%s\\n' $?\n")
        self._shell.stdin.flush()
        said: list[str] = []
        for line in self._shell.stdout:
            if line.startswith(MARK):
                return int(line.removeprefix(MARK)), "".join(said)
            said.append(line)
        raise AssertionError(f"the shell ended at: {command}\n{''.join(said)}")

    def run(self, program: str) -> str:
        """What the Python program printed. It must have succeeded."""
        line = [self.folder / ".venv/bin/python", "-c", program]
        done = subprocess.run(
            line, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def find_the_service(self) -> None:
        """From here on curl finds the service that was started."""
        address = self.home.address()
        assert address is not None
        port = address.url.rpartition(":")[2]
        (self.folder / ".curlrc").write_text(f'connect-to = "127.0.0.1:{PORT}:127.0.0.1:{port}"\nsilent\n')

    def fork_commands(self) -> None:
        """From here on `atoll` costs a tenth."""
        self.type(forked.shell_function())

    def cancel_jobs(self) -> None:
        """Ask every job that has not ended to end."""
        with Client.at(self.home.path) as client:
            for one in client.jobs():
                if not one.state.final:
                    client.cancel(one.job)

    def leave(self) -> None:
        """Nothing is left running, whatever happened."""
        self._shell.communicate(timeout=PATIENCE_S)
        done = subprocess.run([sys.executable, "-m", "api.cli", "down"], cwd=self.folder, env=self._environment)
        assert done.returncode == 0
