"""Building: a base made by debootstrap in the place of ``python:3.11-slim``, and the image on it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SUITE = "bookworm"
BASE, IMAGE = "localhost/python-base", "localhost/atoll:check"
SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TRUST = ("/etc/ssl/certs", "/usr/local/share/ca-certificates")
"""Of this machine, where certificates of its package registries may lie, which the image does not keep."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one instruction of the Dockerfile added to the image. ``size`` is in bytes, unpacked."""

    size: int
    made_by: str


class Builder:
    """buildah with a storage of its own below ``folder``, which later builds find again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._storage = ("--root", str(folder / "storage"), "--runroot", str(folder / "run"))

    def base(self) -> None:
        """Make the base, once: Debian's Python with venv and headers, under the names that the official image has."""
        if BASE in self._do("images", "--format", "{{.Name}}"):
            return
        tree = self._folder / "base"
        packages = "--include=python3,python3-venv,libpython3-dev,ca-certificates"
        shutil.rmtree(tree, ignore_errors=True)
        subprocess.run(["debootstrap", "--variant=minbase", packages, SUITE, str(tree)], check=True)
        (tree / "usr/bin/python").symlink_to("python3")
        (tree / "etc/hosts").touch()  # an engine mounts its own there
        for path in (*(tree / "var/cache/apt").rglob("*.deb"), *(tree / "var/lib/apt/lists").glob("*_*")):
            path.unlink()
        container = self._do("from", "scratch")
        self._do("add", "--quiet", container, f"{tree}/")
        self._do("config", f"--env=PATH={SEARCHED}", "--cmd=python", container)
        self._do("commit", "--quiet", "--rm", container, BASE)

    def image(self) -> None:
        """Build ``deploy/Dockerfile`` as the repository is. Says what buildah says."""
        volumes = [f"--volume={path}:{path}:ro" for path in TRUST if Path(path).is_dir()]
        given = ["--isolation=chroot", "--format=docker", "--layers", f"--build-arg=PYTHON_IMAGE={BASE}", *volumes]
        files = ["--ignorefile=deploy/Dockerfile.dockerignore", "--file=deploy/Dockerfile", f"--tag={IMAGE}"]
        subprocess.run(["buildah", *self._storage, "build", *given, *files, "."], check=True, cwd=ROOT)

    def layers(self) -> list[Layer]:
        """The layers of the image from its base up; instructions that add nothing have none."""
        inspected = json.loads(self._do("inspect", "--type", "image", IMAGE))
        sizes = [layer["size"] for layer in json.loads(inspected["Manifest"])["layers"]]
        makers = [entry["created_by"] for entry in inspected["OCIv1"]["history"] if not entry.get("empty_layer")]
        return [Layer(size, maker) for size, maker in zip(sizes, makers, strict=True)]

    def configuration(self) -> dict[str, Any]:
        """What the image says of itself: Env, User, Entrypoint, WorkingDir, as in the image specification of OCI."""
        inspected = json.loads(self._do("inspect", "--type", "image", IMAGE))
        configuration: dict[str, Any] = inspected["OCIv1"]["config"]
        return configuration

    @contextmanager
    def mounted(self, name: str) -> Iterator[Path]:
        """The root file system of the image, for as long as it is needed. Nothing may be written to it."""
        container = self._do("from", name)
        try:
            yield Path(self._do("mount", container))
        finally:
            self._do("umount", container)
            self._do("rm", container)

    def _do(self, *arguments: str) -> str:
        done = subprocess.run(["buildah", *self._storage, *arguments], check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()


def unwanted(tree: Path) -> list[str]:
    """What must not be in the image: compilers, tests of ours, caches of pip and apt, files with secrets."""
    names = ("gcc", "cc", "g++", "c++", "clang", "make", "ld")
    compilers = [path for name in names for form in (name, f"*-{name}") for path in tree.glob(f"usr/bin/{form}")]
    ours = [tree / "opt/atoll/tests", *tree.glob("opt/venv/lib/python*/site-packages/tests")]
    caches = [
        *tree.glob("root/.cache/pip"),
        *tree.glob("var/cache/apt/archives/*.deb"),
        *tree.glob("var/lib/apt/lists/*_*"),
    ]
    secrets = [*tree.glob("opt/**/.env"), *tree.glob("var/lib/atoll/**/token")]
    found = [*compilers, *ours, *caches, *secrets]
    return [str(path.relative_to(tree)) for path in found if path.exists()]
