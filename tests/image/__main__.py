"""``python -m tests.image [--folder FOLDER]``: build the image, look into it, and run it as Compose would.

The story: all services of ``deploy/compose.yaml`` become healthy, but Grafana, whose image cannot be had here; a job
trains on two regions; one island is killed and comes back, one is drained and added again; the head is lost and comes back;
Prometheus has the job's figures; the job ends as it was told. Everything is ended and removed afterwards, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.client import Client
from orchestrator.errors import AtollError
from tests.image.build import BASE, IMAGE, ROOT, Builder, unwanted
from tests.image.compose import Service, services
from tests.image.container import Container, Image
from tests.wan.regions import Regions

PROGRAMS = ("buildah", "debootstrap", "bwrap", "setpriv", "nsenter", "ip", "prometheus", "wget")
ELSEWHERE = "grafana"
"""The service whose image nobody can have here."""
PATIENCE_S = 600.0
JOB: dict[str, Any] = {
    "name": "image",
    "model": {"preset": "nano"},
    "data": {"source": "builtin", "sequence_length": 64},
    "training": {"batch_size": 2},
    "synchroniser": {"fragments": 4, "interval_steps": 8, "overlap_steps": 4, "grace_cap_steps": 2},
    "islands": [{"node_group": "us-east"}, {"node_group": "europe"}],
    "budget": {"steps": 1_000_000},
}


class Composed:
    """The services in containers, in the order of what each waits for."""

    def __init__(self, wanted: dict[str, Service], ours: Image, theirs: Image, folder: Path, regions: Regions) -> None:
        self._wanted, self._images, self._folder, self._regions = wanted, (theirs, ours), folder, regions
        self.containers: dict[str, Container] = {}

    def up(self) -> None:
        for name in self._wanted:
            self._start(name)

    def _start(self, name: str) -> None:
        service = self._wanted[name]
        if name in self.containers:
            return
        for other, condition in service.after.items():
            self._start(other)
            if condition == "service_completed_successfully":
                status = self.containers[other].wait()
                assert status == 0, f"{other} ended with {status}:\n{self.containers[other].log()}"
            else:
                wait_for(f"{other} is healthy", lambda other=other: self.containers[other].healthy)
        self.begin(name)

    def begin(self, name: str) -> None:
        """Start the service, also once more: then its volumes are what they were."""
        service = self._wanted[name]
        image = self._images[service.ours]
        for mount in service.mounts:
            if isinstance(mount.source, str):
                self._volume(mount.source, image.tree / mount.target[1:], service.user)
        enter = self._regions.places[service.network].enter
        self.containers[name] = Container(service, image, self._folder, enter, self._folder / f"{name}.log")

    def tend(self) -> None:
        """As an engine keeps ``restart``: a service that has ended is begun again, unless it is to run once."""
        for name, container in list(self.containers.items()):
            if self._wanted[name].restarts and not container.running:
                self.begin(name)

    def down(self) -> None:
        for container in reversed(self.containers.values()):
            container.kill()

    def _volume(self, name: str, origin: Path, user: str | None) -> None:
        """As an engine makes one: with the owner and mode of the folder that it covers, if the image has one."""
        volume = self._folder / name
        if volume.exists():
            return
        volume.mkdir(mode=0o755)
        if origin.exists():
            about = origin.stat()
            os.chown(volume, about.st_uid, about.st_gid)
            volume.chmod(about.st_mode & 0o7777)
        elif user is not None:
            os.chown(volume, int(user), int(user))


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m tests.image", description=__doc__)
    options.add_argument(
        "--folder", type=Path, default=ROOT / ".cache" / "image", help="where base and layers are kept"
    )
    folder = options.parse_args().folder
    if os.geteuid() != 0:
        sys.exit("image-check mounts file systems and makes network namespaces: run it as root")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        sys.exit(f"not installed: {', '.join(missing)} (deploy/system-packages.sh image installs them)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    builder = Builder(folder)
    with telling("the base is made"):
        builder.base()
    with telling("the image is built"):
        builder.image()
    total = 0
    for layer in builder.layers():
        total += layer.size
        print(f"  {layer.size / 1e6:8.1f} MB  {' '.join(layer.made_by.split())[:90]}")
    print(f"  {total / 1e6:8.1f} MB  in all, unpacked")
    with ExitStack() as stack:
        tree, base = stack.enter_context(builder.mounted(IMAGE)), stack.enter_context(builder.mounted(BASE))
        assert not (found := unwanted(tree)), f"these have no place in the image: {found}"
        print("  no compiler, test, cache or secret in it")
        run(builder.configuration(), tree, base, stack)
    print("image-check passed")


def run(configuration: dict[str, Any], tree: Path, base: Path, stack: ExitStack) -> None:
    """The story. Raises AssertionError at what does not hold."""
    wanted = services({"GRAFANA_PASSWORD": "unused"})
    del wanted[ELSEWHERE]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-image-")))
    folder.chmod(0o755)
    regions = Regions(sorted({service.network for service in wanted.values()}))
    stack.callback(regions.close)
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{p.address} {n}\n" for n, p in regions.places.items()))
    environment = dict(line.split("=", 1) for line in configuration["Env"])
    assert int(configuration["User"]) > 0, "the image's user is root"
    known = {"/etc/hosts": str(hosts)}
    ours = Image(
        tree, configuration["User"], tuple(configuration["Entrypoint"]), environment, configuration["WorkingDir"], known
    )
    programs = {f"/usr/bin/{name}": str(shutil.which(name)) for name in ("prometheus", "wget")}
    theirs = Image(base, "65534", ("prometheus",), {"PATH": "/usr/bin:/bin"}, "/", {})
    composed = Composed(wanted, ours, with_programs(theirs, programs, stack), folder, regions)
    stack.callback(composed.down)
    with telling("all services are healthy"):
        composed.up()
        for name, container in composed.containers.items():
            if name != "viewer-token":
                wait_for(f"{name} is healthy", lambda container=container: container.healthy)
    story(composed, regions.address("api"))


def with_programs(image: Image, programs: dict[str, str], stack: ExitStack) -> Image:
    """The image with these programs of the machine, and its libraries, which they need, in the place of its own."""
    libraries = {path: path for path in ("/lib", "/lib64", "/usr/lib", "/etc/ssl") if Path(path).exists()}
    tree = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-image-root-")))
    tree.chmod(0o755)
    for name in (
        "bin",
        "sbin",
        "usr",
        "usr/bin",
        "usr/lib",
        "lib",
        "lib64",
        "etc",
        "etc/ssl",
        "proc",
        "dev",
        "sys",
        "tmp",
    ):
        (tree / name).mkdir(exist_ok=True)
    for name in ("etc/prometheus", "etc/prometheus/credentials", "prometheus"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    os.chown(tree / "prometheus", int(image.user), int(image.user))
    for name in ("setpriv", *(Path(path).name for path in programs)):
        shutil.copy2(str(shutil.which(name)), tree / "usr/bin" / name)
    for name in ("prometheus.yml", "alerts.yml"):
        (tree / "etc/prometheus" / name).touch()
    return Image(tree, image.user, image.entrypoint, image.environment, image.folder, libraries)


def story(composed: Composed, address: str) -> None:
    api = composed.containers["api"]
    refused = api.run("sh", "-c", "touch /opt/atoll/written || touch /var/lib/atoll/written")
    assert refused.returncode != 0, "the root is not read-only"
    assert api.run("id", "-u").stdout.strip() == "10001", "a container runs as another user than the image's"
    token = api.run("cat", "/var/lib/atoll/home/token").stdout.strip()
    with Client(f"http://{address}:8470", token=token) as client:
        job = client.submit(JOB).job
        seen = Seen(composed, client, job)
        with telling("both islands contribute"):
            wait_for("contributions of both", lambda: seen.contribute({"us-east": 1, "europe": 1}))
        with telling("an island is killed and contributes again"):
            client.kill(job, "europe")
            wait_for("europe's second life", lambda: seen.contribute({"us-east": 1, "europe": 2}))
        with telling("an island is drained and added again"):
            client.drain(job, "us-east")
            wait_for("us-east drained", lambda: seen.island("us-east").state not in ("training", "draining"))
            client.readd(job, "us-east")
            wait_for("us-east's second life", lambda: seen.contribute({"us-east": 2, "europe": 2}))
        with telling("the head is lost, comes back, and the job goes on"):
            epoch = client.job(job).epoch
            composed.containers["head"].kill()
            wait_for("another life of the synchroniser", lambda: seen.answer().epoch > epoch)
            wait_for("contributions after it", lambda: seen.contribute({"us-east": 2, "europe": 2}, epoch + 1))
        with telling("Prometheus has the job's figures"):
            wait_for("goodput in Prometheus", lambda: job in measured(composed.containers["prometheus"]))
        with telling("the job is cancelled"):
            client.cancel(job)
            wait_for("its end", lambda: seen.answer().state == "cancelled")


@dataclass(frozen=True)
class Seen:
    """A job as its service shows it, while an engine would look after the services."""

    composed: Composed
    client: Client
    job: str

    def answer(self) -> Any:
        """The job's status. Waits while the service has nothing new: the head may be away."""
        answers: list[Any] = []

        def asked() -> bool:
            self.composed.tend()
            with suppress(AtollError):
                answers.append(self.client.job(self.job))
            return bool(answers)

        wait_for("an answer of the service", asked)
        return answers[0]

    def island(self, name: str) -> Any:
        return next(one for one in self.answer().islands if one.island == name)

    def contribute(self, lives: dict[str, int], epoch: int = 0) -> bool:
        """Whether each island trains in at least this incarnation, and some merge had it since it was placed."""
        now = self.answer()
        return now.epoch >= epoch and all(
            one.state == "training" and one.incarnation >= lives[one.island] and one.last_merge_after_s is not None
            for one in now.islands
        )


def measured(prometheus: Container) -> str:
    return prometheus.run("wget", "-qO-", "http://127.0.0.1:9090/api/v1/query?query=atoll_goodput_ratio").stdout


def wait_for(what: str, situation: Callable[[], Any]) -> None:
    """Raises AssertionError once it has lasted so long that it will never be."""
    deadline = time.monotonic() + PATIENCE_S
    while not situation():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:.0f} s"
        time.sleep(0.5)


@contextmanager
def telling(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{what} ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
