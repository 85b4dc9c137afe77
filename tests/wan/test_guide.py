"""docs/guide/machines-that-join.md is typed word for word, on three machines that share nothing but the kernel.

A machine is a network namespace with its own mounts (/tmp, /etc, /var/lib, /dev/shm), process ids and host name, and a shell
in it. `scp` is done for it, because no machine here runs sshd. A command that stays in the foreground is put into the
background, and what the page tells people to do by hand (Ctrl-C, start it again) is done where it says so.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.documents import DOCS, FENCE, Block
from tests.programs import required
from tests.waiting import wait_until
from tests.wan.regions import Regions

pytestmark = [pytest.mark.ray, pytest.mark.soak("minutes"), pytest.mark.timeout(1800)]
GUIDE = DOCS / "guide" / "machines-that-join.md"
NET, HEAD, EAST, WEST = "198.51.100", "198.51.100.1", "198.51.100.2", "198.51.100.3"
PLACE = re.compile(r"# on (\S+)\n")
STAYS = re.compile(r"atoll (head|serve|join) ")
SAYS = {"head": "The head answers at", "serve": "Application startup complete", "join": "This machine is a node of"}
TRAIN = r"one +\S+ +training.*\n(.*\n)*?two +\S+ +training"
MARK = "-- exit code "
MOUNTS = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
mkdir /tmp/up /tmp/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/tmp/up,workdir=/tmp/work /etc
mount -t tmpfs tmpfs /var/lib
mkdir -p /etc/atoll /var/lib/atoll
hostname {name}
cd /var/lib/atoll
"""


class Machine:
    """A shell on a machine of its own, and the programs that it has in the foreground of other terminals."""

    def __init__(self, regions: Regions, name: str) -> None:
        enter = [*regions.places[name].enter, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc"]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._shell = subprocess.Popen(
            [*enter, "--mount-proc", "bash"],
            env={"PATH": path, "HOME": "/tmp", "COLUMNS": "160"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.type(MOUNTS.format(name=name))
        self.type("set +e")
        self._commands: dict[str, str] = {}

    def attempt(self, command: str) -> tuple[int, str]:
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

    def type(self, command: str) -> str:
        code, said = self.attempt(command)
        assert code == 0, f"$ {command}\n{said}\nexit code {code}"
        return said

    def stay(self, command: str) -> None:
        """Type a command that stays, in a terminal of its own. Returns once it says that it works."""
        kind = command.split()[1]
        self._commands[kind] = command
        self.type(f": > /tmp/{kind}.log\n{command} >> /tmp/{kind}.log 2>&1 & {kind}_pid=$!")
        wait_until(lambda: SAYS[kind] in self.log(kind) or not self.runs(kind), f"{command}: {SAYS[kind]}", 0.5)
        code = None if self.runs(kind) else self.attempt(f"wait ${kind}_pid")[0]
        assert SAYS[kind] in self.log(kind), f"{command} ended with exit code {code}"

    def log(self, kind: str) -> str:
        return self.type(f"cat /tmp/{kind}.log")

    def runs(self, kind: str) -> bool:
        return self.attempt(f"kill -0 ${kind}_pid")[0] == 0

    def end(self, kind: str, number: signal.Signals) -> None:
        """Send the signal to the program alone, and wait until it has ended."""
        self.type(f"kill -{number.value} ${kind}_pid")
        wait_until(lambda: not self.runs(kind), f"the end of {kind}", 0.2)

    def again(self, kind: str) -> None:
        self.stay(self._commands[kind])

    def path(self, path: str) -> Path:
        """The path as this machine sees it, for somebody outside."""
        (shell,) = psutil.Process(self._shell.pid).children()
        return Path(f"/proc/{shell.pid}/root", os.path.join("/var/lib/atoll", path).lstrip("/"))

    def switch_off(self) -> None:
        for child in psutil.Process(self._shell.pid).children():
            child.kill()  # the first process of the machine: all others end with it
        self._shell.communicate()


@pytest.fixture
def machines() -> Iterator[dict[str, Machine]]:
    required("unshare")
    regions = Regions(["head", "east", "west"], net=NET)
    made: dict[str, Machine] = {}
    try:
        for name, address in zip(("head", "east", "west"), (HEAD, EAST, WEST), strict=True):
            made[address] = Machine(regions, name)
        yield made
    finally:
        for machine in made.values():
            machine.switch_off()
        regions.close()


def sections() -> dict[str, list[Block]]:
    """The blocks of the page, by the heading that they are below."""
    found: dict[str, list[Block]] = {}
    for part in re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)[1:]:
        found[part.splitlines()[0]] = [Block(kind, text) for kind, text in FENCE.findall(part)]
    return found


def do(machines: dict[str, Machine], block: Block) -> None:
    """Type the commands of the block on the machine that it names."""
    place = PLACE.match(block.text)
    assert place, block.text
    machine = machines[place[1]]
    for command in block.commands:
        line = command.partition("#")[0].strip()
        if line.startswith("scp "):
            copy(machines, machine, shlex.split(line)[1:])
        elif STAYS.match(line):
            machine.stay(line)
        elif "# again, until both are training" in command:
            wait_until(lambda line=line: re.search(TRAIN, machine.type(line)), line, 1.0)
        else:
            machine.type(line)


def copy(machines: dict[str, Machine], here: Machine, words: list[str]) -> None:
    source, target = [word for word in words if not word.startswith("-")]
    address, _, path = target.removeprefix("root@").partition(":")
    origin, destination = here.path(source), machines[address].path(path)
    if origin.is_dir():
        shutil.copytree(origin, destination, dirs_exist_ok=True)
    else:
        shutil.copy2(origin, destination)


def merges(head: Machine) -> int:
    return int(re.search(r"version (\d+)", head.type("atoll status latest"))[1])  # type: ignore[index]


def lives(head: Machine) -> list[str]:
    """The incarnations of the islands, which all train."""
    seen = wait_until(lambda: re.search(TRAIN, said := head.type("atoll islands latest")) and said, "both train", 1.0)
    return re.findall(r"training +(\d+)", seen)


def wait_for_merges(head: Machine) -> None:
    before = merges(head)
    wait_until(lambda: merges(head) > before + 4, "merges", 1.0)


def test_the_guide_works_word_for_word_on_machines_that_share_nothing(machines: dict[str, Machine]) -> None:
    page, head = sections(), machines[HEAD]
    for name in ("Start a head and a service", "Join"):
        for block in page[name]:
            if block.kind == "yaml":
                head.path("job.yaml").write_text(block.text)
            else:
                do(machines, block)
    assert re.search(r"spot +\S+ +2 ", head.type("atoll node-groups"))
    operate, rotate, retire = page["Operate"]
    do(machines, operate)
    wait_for_merges(head)

    before = lives(head)
    head.end("head", signal.SIGKILL)  # the head is lost, with everything on it
    time.sleep(1.0)
    head.again("head")
    wait_until(lambda: head.attempt("atoll status latest")[0] == 0, "the service again", 1.0)
    wait_for_merges(head)
    assert lives(head) == before, "the loss of the head ended no island"

    former = head.path("fleet/ca.crt").read_text()
    for block in (rotate, retire):
        do(machines, block)
        for address in (EAST, WEST):
            machines[address].end("join", signal.SIGTERM)
            assert "No process of a job runs here any more" in machines[address].log("join")
            machines[address].again("join")
            wait_until(lambda: re.search(TRAIN, head.type("atoll islands latest")), "both train", 1.0)
        head.end("serve", signal.SIGTERM)
        head.end("head", signal.SIGTERM)
        head.again("head")
        head.again("serve")
        wait_until(lambda: head.attempt("atoll status latest")[0] == 0, "the service again", 1.0)
        wait_for_merges(head)
    assert former.split("-----END")[0] not in machines[EAST].path("/etc/atoll/certificates/ca.crt").read_text()

    machines[EAST].end("join", signal.SIGTERM)  # one machine leaves for good
    wait_until(lambda: re.search(TRAIN, head.type("atoll islands latest")), "both train on the other machine", 1.0)
    wait_for_merges(head)
    head.type("atoll cancel latest")
    assert "cancelled" in head.attempt("atoll watch latest")[1]
