"""docs/guide/machines-that-join.md is typed word for word, on three machines that share nothing but the kernel.

A machine is a network namespace with its own mounts (/tmp, /etc, /var/lib, /dev/shm), process ids and host name, and a shell
in it. `scp` is done for it, because no machine here runs sshd. A command that stays in the foreground is put into the
background, and what the page tells people to do by hand (Ctrl-C, start it again) is done where it says so.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.system import release
from tests.documents import DOCS, FENCE, Block
from tests.programs import required
from tests.waiting import wait_until
from tests.wan.regions import Regions

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]
GUIDE = DOCS / "guide" / "machines-that-join.md"
NET, HEAD, EAST, WEST = "198.51.100", "198.51.100.1", "198.51.100.2", "198.51.100.3"
PLACE = re.compile(r"# on (\S+)\n")
STAYS = re.compile(r"atoll (head|serve|join) ")
SAYS = {"head": "The head answers at", "serve": "Application startup complete", "join": "This machine is a node of"}
TRAIN = r"one +\S+ +training.*\n(.*\n)*?two +\S+ +training"
MARK = "-- exit code "
HIDDEN = ("/tmp", "/var/lib", "/var/cache")
"""Folders of which each machine has its own."""
OURS = [
    shlex.quote(str(folder))
    for folder in sorted({DOCS.parent, Path(sys.prefix), Path(sys.base_prefix)})
    if any(folder.is_relative_to(hidden) for hidden in HIDDEN)
]
KEEP = "\n".join(f"mkdir -p $kept/{n} && mount --bind {ours} $kept/{n}" for n, ours in enumerate(OURS))
GIVE_BACK = "\n".join(f"mkdir -p {ours} && mount --bind $kept/{n} {ours}" for n, ours in enumerate(OURS))
"""Where a checkout lies in such a folder, it is bound to ``$kept`` first, and afterwards to where it was."""
MOUNTS = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
kept=/dev/shm/kept
{keep}
mount -t tmpfs tmpfs /tmp
mkdir /tmp/up /tmp/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/tmp/up,workdir=/tmp/work /etc
mount -t tmpfs tmpfs /var/lib
{give_back}
mkdir -p /etc/atoll /var/lib/atoll
hostname {name}
cd /var/lib/atoll
"""


TARGETS = ("basic", "sysinit", "network-online", "shutdown", "umount", "final", "sockets", "timers", "paths", "slices")
BOOT = """
set -e
mount --make-rprivate /
umask 022
for folder in units installed settings state; do mkdir -p {folder}/$folder; done
mount -t tmpfs tmpfs /run
mkdir -p /run/lock /run/up /run/work /run/open /run/work2 /run/bound
mount --bind {folder} /run/bound
mount -t tmpfs tmpfs /dev/shm
kept=/run/kept
{keep}
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/up,workdir=/run/work /etc
mount -t overlay overlay -o lowerdir={private},upperdir=/run/open,workdir=/run/work2 {private}
for folder in /var/lib /var/cache /tmp; do mount -t tmpfs -o mode=1777 tmpfs $folder; done
{give_back}
mkdir -p /var/lib/atoll /etc/atoll
mount --bind /run/bound/units /lib/systemd/system
mount --bind /run/bound/installed /etc/systemd/system
mount --bind /run/bound/settings /etc/atoll
mount --bind /run/bound/state /var/lib/atoll
useradd --system --home-dir /var/lib/atoll --shell /usr/sbin/nologin atoll
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t proc proc /proc
hostname machine
echo 0123456789abcdef0123456789abcdef > /etc/machine-id
exec env -i container=atoll PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=multi-user.target \
    --log-target=console --show-status=0
"""


class SystemdMachine:
    """A machine whose first process is systemd. What it has in /etc/atoll, /var/lib/atoll and of units outlives a boot."""

    def __init__(self, regions: Regions, folder: Path) -> None:
        self._place, self._folder = regions.places["head"], folder
        mounted = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
        self._cgroup = (
            next(path for path in mounted if (path / "cgroup.procs").exists()) / f"atoll-{secrets.token_hex(4)}"
        )
        self._cgroup.mkdir()
        units = folder / "units"
        units.mkdir()
        for name in TARGETS:
            (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\n")
        wanted = "[Unit]\nDescription=all\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n"
        (units / "multi-user.target").write_text(wanted)
        logged = folder / "installed" / "service.d" / "log.conf"  # nothing here keeps a journal
        logged.parent.mkdir(parents=True)
        output = "append:/var/lib/atoll/%n.log"
        logged.write_text(f"[Service]\nStandardOutput={output}\nStandardError={output}\n")
        self.boot()

    def boot(self) -> None:
        private = next(
            path for path in (Path(sys.base_prefix), *Path(sys.base_prefix).parents) if path.parent == Path("/")
        )
        first = f"echo $$ > {self._cgroup}/cgroup.procs; exec "
        own = ["unshare", "--cgroup", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "bash", "-c"]
        inner = shlex.join([*own, BOOT.format(folder=self._folder, private=private, keep=KEEP, give_back=GIVE_BACK)])
        with (self._folder / "console.log").open("ab") as log:
            self._outer = subprocess.Popen(
                [*self._place.enter, "bash", "-c", first + inner], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(lambda: self.attempt("systemctl is-active multi-user.target")[0] == 0, self.console, 0.5)

    def console(self) -> str:
        logs = [self._folder / "console.log", *sorted((self._folder / "state").glob("*.service.log"))]
        return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs)

    def wait_until(self, situation: Callable[[], object], what: str) -> None:
        try:
            wait_until(situation, what, 1.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.console()}") from error

    def wait_until_it_trains(self) -> None:
        self.wait_until(lambda: re.search(TRAIN, self.attempt("atoll islands latest")[1]), "both train")

    def attempt(self, command: str) -> tuple[int, str]:
        inside = psutil.Process(self._outer.pid).children()
        if not inside:
            return 1, "it has not begun"
        enter = ["nsenter", "--target", str(inside[0].pid), "--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup"]
        path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        done = subprocess.run(
            [*enter, "bash", "-c", f"cd /var/lib/atoll; {command}"],
            env={"PATH": path, "HOME": "/tmp", "COLUMNS": "160"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def type(self, command: str) -> str:
        code, said = self.attempt(command)
        assert code == 0, f"$ {command}\n{said}\nexit code {code}\n{self.console()}"
        return said

    def switch_off(self) -> None:
        for first in psutil.Process(self._outer.pid).children():
            first.kill()  # all others end with it
        self._outer.wait()

    def close(self) -> None:
        self.switch_off()
        for folder, _, _ in os.walk(self._cgroup, topdown=False):
            wait_until(lambda folder=folder: not Path(folder, "cgroup.procs").read_text(), "the end of its processes")
            os.rmdir(folder)


class Machine:
    """A shell on a machine of its own, and the programs that it has in the foreground of other terminals."""

    def __init__(self, regions: Regions, name: str, shared: Path | None = None) -> None:
        """``shared`` is a folder that it sees as /mnt."""
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
        self.type(f"mount --make-rprivate / && mount --bind {shared} /mnt" if shared is not None else "true")
        self.type(MOUNTS.format(name=name, keep=KEEP, give_back=GIVE_BACK))
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
        try:
            wait_until(lambda: SAYS[kind] in self.log(kind) or not self.runs(kind), f"{command}: {SAYS[kind]}", 0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log(kind)}") from error
        code = None if self.runs(kind) else self.attempt(f"wait ${kind}_pid")[0]
        assert SAYS[kind] in self.log(kind), f"{command} ended with exit code {code}\n{self.log(kind)}"

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


def merges(head: Machine | SystemdMachine) -> int:
    return int(re.search(r"version (\d+)", head.type("atoll status latest"))[1])  # type: ignore[index]


def lives(head: Machine) -> list[str]:
    """The incarnations of the islands, which all train."""
    seen = wait_until(lambda: re.search(TRAIN, said := head.type("atoll islands latest")) and said, "both train", 1.0)
    return re.findall(r"training +(\d+)", seen)


def wait_for_merges(head: Machine | SystemdMachine) -> None:
    before = merges(head)
    wait_until(lambda: merges(head) > before + 4, "merges", 1.0)


def start(machines: dict[str, Machine], page: dict[str, list[Block]], without: str = "") -> None:
    """Type the page up to the point where its job trains, except what is done on the machine ``without``."""
    for name in ("Start a head and a service", "Join"):
        for block in page[name]:
            if block.kind == "yaml":
                machines[HEAD].path("job.yaml").write_text(block.text)
            elif not without or f"# on {without}\n" not in block.text:
                do(machines, block)


def cancel(head: Machine) -> None:
    head.type("atoll cancel latest")
    assert "cancelled" in head.attempt("atoll watch latest")[1]


def test_the_guide_begins_a_job_with_a_head_a_service_and_a_machine_that_joins(machines: dict[str, Machine]) -> None:
    head = machines[HEAD]
    start(machines, sections(), without=WEST)
    groups = json.loads(head.type("atoll node-groups --json"))
    assert [(group["name"], group["nodes"], group["builds"]) for group in groups] == [("spot", 1, [str(release.own())])]
    wait_for_merges(head)
    machines[EAST].end("join", signal.SIGTERM)
    assert "No process of a job runs here any more" in machines[EAST].log("join")
    assert json.loads(head.type("atoll node-groups --json")) == [], "a node that leaves is gone at once"
    cancel(head)


@pytest.mark.soak("minutes")
def test_a_service_on_another_machine_than_the_head_reads_jobs_that_write_there(machines: dict[str, Machine]) -> None:
    head, east, other = machines[HEAD], machines[EAST], machines[WEST]
    head.type("atoll certificates authority fleet")
    for address, folder in ((HEAD, "/etc/atoll/certificates"), (EAST, "east"), (WEST, "west")):
        head.type(f"atoll certificates issue fleet {folder} --name {address}")
    head.stay(f"atoll head --address {HEAD} --certificates /etc/atoll/certificates")
    for address, folder in ((EAST, "east"), (WEST, "west")):
        copy(machines, head, ["-rp", folder, f"root@{address}:/etc/atoll/certificates"])
        copy(machines, head, ["-p", ".atoll/cluster/token", f"root@{address}:/etc/atoll/token"])
        machines[address].type("export RAY_AUTH_TOKEN_PATH=/etc/atoll/token ATOLL_CERTIFICATES=/etc/atoll/certificates")
    other.stay(f"atoll serve --head {HEAD}:6379 --host {WEST}")
    east.stay(f"atoll join {HEAD}:6379 --group spot --region us-east1 --cpus 2")

    (document,) = (block.text for block in sections()["Join"] if block.kind == "yaml")
    other.path("job.yaml").write_text(f"{document}checkpoints: {{every_merges: 16, keep: 2}}\n")
    job = json.loads(other.type("atoll submit job.yaml --json"))["job"]
    wait_until(lambda: re.search(TRAIN, other.type("atoll islands latest")), "both train", 1.0)
    wait_for_merges(other)
    wait_until(lambda: json.loads(other.type("atoll checkpoints latest --json")), "a checkpoint", 1.0)
    assert "incarnation 1, is process" in other.type("atoll logs latest one")
    assert "everyone was in" in other.type("atoll merges latest")

    other.end("serve", signal.SIGKILL)  # it copies on where it was
    other.again("serve")
    wait_for_merges(other)
    program = (
        "from api.client import *; Client.at(Path('.atoll')).download_parameters('latest', Path('now.safetensors'))"
    )
    other.type(f'python -c "{program}"')
    assert not list(head.path(f"runs/{job}").glob("parameters-*")), "nor does the head keep it"
    cancel(other)
    assert json.loads(other.type("atoll report latest --json"))
    here, there = other.path(f"runs/{job}"), head.path(f"runs/{job}")
    for name in ("tape.jsonl", "status.json", "report.html", "merged.safetensors"):
        assert (here / name).read_bytes() == (there / name).read_bytes(), name
    assert not (here / "journal").exists(), "only a job reads it"

    other.type(f"atoll submit job.yaml --resume {job}")
    wait_for_merges(other)
    cancel(other)
    other.type(f"atoll delete {job} --yes")
    assert not here.exists()
    wait_until(lambda: not there.exists() and not east.path(f"runs/{job}").exists(), "the sweep", 1.0)
    assert head.path("runs").is_dir()


@pytest.mark.soak("minutes")
def test_systemd_brings_head_service_and_node_back_after_kills_and_a_restart_of_the_machine(tmp_path: Path) -> None:
    for program in ("unshare", "nsenter", "systemctl", "useradd"):
        required(program)
    regions = Regions(["head"], net=NET)
    page = sections()
    (commands,) = (block.commands for block in page["Under systemd"] if block.kind == "console")
    (document,) = (block.text for block in page["Join"] if block.kind == "yaml")
    machine = SystemdMachine(regions, tmp_path)
    try:
        machine.type(
            f"atoll certificates authority fleet; atoll certificates issue fleet /etc/atoll/certificates --name {HEAD}"
        )
        head, service, join = commands
        machine.type(head)
        copy_token = "install -m 600 /var/lib/atoll/.atoll/cluster/token /etc/atoll/token"
        wait_until(lambda: machine.attempt(copy_token)[0] == 0, "the cluster's secret", 0.5)
        machine.type(service)
        machine.type(join)
        (tmp_path / "state" / "job.yaml").write_text(document)
        machine.wait_until(lambda: re.search(r"spot +us-east1 +1 ", machine.attempt("atoll node-groups")[1]), "a node")
        machine.type("atoll submit job.yaml")
        machine.wait_until_it_trains()

        units = ("head", "service", "join")
        for unit in units:
            machine.type(f"kill -9 $(systemctl show --property MainPID --value atoll-{unit})")
        for unit in units:
            restarts = f"systemctl show --property NRestarts --value atoll-{unit}"
            machine.wait_until(lambda restarts=restarts: int(machine.type(restarts)) > 0, f"{unit} again")
        machine.wait_until_it_trains()
        wait_for_merges(machine)

        machine.switch_off()
        machine.boot()
        machine.wait_until_it_trains()
        wait_for_merges(machine)
        machine.type("systemctl stop atoll-join")
        assert json.loads(machine.type("atoll node-groups --json")) == []
    finally:
        machine.close()
        regions.close()


@pytest.mark.soak("minutes")
def test_the_guide_works_word_for_word_on_machines_that_share_nothing(machines: dict[str, Machine]) -> None:
    page, head = sections(), machines[HEAD]
    start(machines, page)
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
    cancel(head)
