"""The image and the composition, as far as they can be judged without a container engine."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from orchestrator.certificates import folders
from orchestrator.runtime import head
from orchestrator.runtime.settings import GROUP_LABEL, REGION_LABEL
from orchestrator.system import user_packages
from tests.api.installation import ROOT
from tests.waiting import PATIENCE_S

DEPLOY = ROOT / "deploy"
EXAMPLE = (DEPLOY / ".env.example").read_text().splitlines()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
DOCKERFILE = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
INSTRUCTIONS = [tuple(line.split(" ", 1)) for line in DOCKERFILE.splitlines() if line and line[0] not in "# "]
NODE = SimpleNamespace(**runpy.run_path(str(DEPLOY / "node.py")))

STARTED = """
import json, pathlib, runpy, sys
node = runpy.run_path(sys.argv[1])
its = node["main"].__globals__
its["OWN"] = pathlib.Path(sys.argv[2], "own")
its["python_process"].become = lambda command: sys.exit(print(json.dumps(command)))
its["main"](["--state", sys.argv[2], *sys.argv[3:]])
"""
"""A container as far as the program that it becomes, whose command line is printed."""

by_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def mounts(service: dict[str, Any]) -> list[list[str]]:
    return [mount.split(":") for mount in service.get("volumes", ())]


# ── the image ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_base_image_is_the_one_that_may_be_pinned_by_its_digest() -> None:
    assert {rest.split()[0] for rest in arguments("FROM")} == {"${PYTHON_IMAGE}"}
    (default,) = [rest.partition("=")[2] for rest in arguments("ARG") if rest.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", default)
    assert f"PYTHON_IMAGE={default}" in EXAMPLE
    assert OURS["head"]["build"]["args"]["PYTHON_IMAGE"] == f"${{PYTHON_IMAGE:-{default}}}"


def test_the_image_runs_as_somebody_who_may_do_nothing() -> None:
    final = INSTRUCTIONS[max(n for n, (name, _) in enumerate(INSTRUCTIONS) if name == "FROM") :]
    users = [(n, user) for n, (name, user) in enumerate(final) if name == "USER"]
    (made,) = [re.search(r"--uid (\d+)", rest) for name, rest in final if name == "RUN" and "useradd" in rest]
    assert made is not None
    assert [user for _, user in users] == [made[1]]
    assert int(made[1]) > 0
    start = next(n for n, (name, _) in enumerate(final) if name == "ENTRYPOINT")
    assert users[0][0] < start
    assert not any(name == "RUN" for name, _ in final[users[0][0] :]), "nothing is installed where it could be changed"


def test_the_image_says_whether_it_is_well_and_installs_only_what_is_locked() -> None:
    assert len(arguments("HEALTHCHECK")) == 1
    assert not arguments("ADD")
    installs = [run for run in arguments("RUN") if re.search(r"bin/pip .*install", run) and "--no-deps" not in run]
    assert all("--require-hashes" in run for run in installs)
    assert len(installs) == 3, "what builds, what runs, and what an extra needs besides"


def test_the_image_is_of_the_versions_that_are_tested() -> None:
    tested = pins("requirements.lock")
    assert pins("requirements-image.lock") < tested
    assert pins("requirements-build.lock") < tested
    assert not {"pytest", "mypy", "playwright"} & {pin.partition("==")[0] for pin in pins("requirements-image.lock")}


def pins(lock: str) -> set[str]:
    return set(re.findall(r"^[^\s#]+==\S+", (ROOT / lock).read_text(), re.MULTILINE))


def test_what_is_copied_into_the_image_exists_and_is_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [rest.split()[:-1] for rest in arguments("COPY") if not rest.startswith("--from")]
    for source in (name for names in copied for name in names):
        assert list(ROOT.glob(source)), source
        assert f"!{source.split('/')[0]}" in ignored, source
    assert "deploy/prometheus/credentials" in ignored


def test_what_a_wheel_is_made_of_is_copied_before_it_is_made() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    made = next(n for n, (name, rest) in enumerate(INSTRUCTIONS) if name == "RUN" and "hatchling build" in rest)
    copied = {source for name, rest in INSTRUCTIONS[:made] if name == "COPY" for source in rest.split()[:-1]}
    assert {*wheel["packages"], *wheel["force-include"]} <= copied


def locked(name: str) -> dict[str, str]:
    """The versions in a lock file, by package."""
    lines = (ROOT / f"requirements{name}.lock").read_text().splitlines()
    pinned = (line.split()[0].partition("==") for line in lines if "==" in line and line[:1].isalnum())
    return {package.partition("[")[0]: version for package, _, version in pinned}


@pytest.mark.parametrize(("extra", "runtime"), [("cuda", "jax-cuda13-plugin"), ("tpu", "libtpu")])
def test_an_accelerators_image_has_its_runtime_and_otherwise_what_the_image_has(extra: str, runtime: str) -> None:
    image, accelerated = locked("-image"), locked(f"-{extra}")
    assert image.items() <= accelerated.items(), "its packages are installed after those of the image"
    assert runtime in accelerated
    assert runtime not in image


def test_the_image_has_what_opens_buckets_in_the_versions_that_tests_use() -> None:
    assert {"s3fs", "gcsfs"} <= locked("-image").keys()
    assert locked("-image").items() <= locked("").items()


def test_the_program_of_every_container_is_where_it_is_looked_for() -> None:
    (target,) = [rest.split()[-1] for rest in arguments("COPY") if rest.startswith("deploy/node.py")]
    assert arguments("ENTRYPOINT") == [f'["python", "-I", "-u", "{target}"]']
    asked = [
        service["healthcheck"]["test"] for service in OURS.values() if "node.py" in str(service.get("healthcheck"))
    ]
    assert asked
    assert all(target in test for test in asked)


# ── the composition ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_there_is_a_head_two_regions_of_islands_the_service_and_its_watchers() -> None:
    assert {"head", "us-east", "europe", "api", "prometheus", "grafana"} <= SERVICES.keys()


@by_service
def test_images_name_their_release(service: dict[str, Any]) -> None:
    given = re.fullmatch(r"\$\{(\w+_IMAGE):-(.*)\}", service["image"])
    image = given[2] if given else service["image"]
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", image.rpartition(":")[2]), service["image"]
    assert f"{given[1]}={image}" in EXAMPLE if given else "build" in service


@by_service
def test_nobody_takes_the_host_or_changes_its_own_program(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["mem_limit"]
    assert 0 < service["pids_limit"] <= 4096


def test_what_has_no_password_listens_where_nobody_else_is() -> None:
    assert "--web.listen-address=127.0.0.1:9090" in SERVICES["prometheus"]["command"]
    assert not [port for service in SERVICES.values() for port in service.get("ports", ()) if port.endswith(":9090")]


@by_service
def test_nobody_is_root_or_can_become_it(service: dict[str, Any]) -> None:
    assert "build" in service or int(service["user"]) > 0, "our own image names its user itself"
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.get("privileged")


@by_service
def test_ports_are_published_on_the_hosts_loopback_only(service: dict[str, Any]) -> None:
    for port in service.get("ports", ()):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), port


@by_service
def test_what_is_mounted_exists(service: dict[str, Any]) -> None:
    for source, target, *_ in mounts(service):
        assert target.startswith("/")
        if source.startswith("."):
            assert (DEPLOY / source).exists(), source
        else:
            assert source in COMPOSE["volumes"], source


@by_service
def test_who_is_waited_for_exists_and_can_be_asked(service: dict[str, Any]) -> None:
    for name, wanted in service.get("depends_on", {}).items():
        if wanted["condition"] == "service_healthy":
            assert SERVICES[name]["healthcheck"]["test"], name
        else:
            assert SERVICES[name]["restart"] == "no", name
    assert service.get("network_mode", "service:api").removeprefix("service:") in SERVICES


def test_no_secret_is_written_down() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert not re.search("PASSWORD|TOKEN|SECRET", name) or value.startswith("${"), name


# ── what the parts are told ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name in OURS if name != "viewer-token"])
def test_a_containers_command_is_one_that_it_understands(name: str) -> None:
    options = NODE.parser().parse_args(OURS[name]["command"])
    place = NODE.Folders(options.state)
    if options.what == "island":
        assert NODE.ray_arguments(options)[-1] == f"{GROUP_LABEL}={name},{REGION_LABEL}={options.region}"
    else:
        command = NODE.program_of(options, Path("/certificates"), ())
        own = command[command.index(head.__name__) + 1 :]
        assert head.parser().parse_args(own).token_file == place.secret
    assert str(place.secret.parent) in [target for _, target, *_ in mounts(OURS[name])]
    if options.what == "head":
        assert str(place.head) in [target for _, target, *_ in mounts(OURS[name])]


def test_synchronisers_islands_and_service_see_the_same_runs() -> None:
    for name in ("head", "us-east", "europe", "api"):
        assert "runs:/var/lib/atoll/runs" in OURS[name]["volumes"], name
    assert str(NODE.Folders(NODE.STATE).runs) == "/var/lib/atoll/runs"


def started(folder: Path, *arguments: str) -> list[str]:
    """The command line that a container becomes, with its volumes in this folder."""
    command = [sys.executable, "-c", STARTED, str(DEPLOY / "node.py"), str(folder), *arguments]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout
    given: list[str] = json.loads(said)
    return given


def test_a_container_whose_packages_would_shadow_a_module_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "queue.py").touch()
    command = [sys.executable, "-I", str(DEPLOY / "node.py"), "head"]
    given = os.environ | {user_packages.VARIABLE: str(tmp_path)}
    begun = subprocess.run(command, env=given, capture_output=True, text=True, timeout=PATIENCE_S)
    assert begun.returncode == 2
    assert "'queue' (of Python's library)" in begun.stderr


def test_a_container_issues_its_own_certificate_by_the_heads_authority_and_speaks_tls_with_it(tmp_path: Path) -> None:
    folders.make_authority(tmp_path / "cluster" / "authority", "of a composition that was made years ago", days=3)
    given = started(tmp_path, "--head", "chief:7000", "head")
    own = tmp_path / "own"
    assert given[given.index("--certificates") + 1] == str(own)
    assert given[given.index("--port") + 1] == "7000"
    for address in ("head", "chief", "127.0.0.1", given[given.index("--address") + 1]):
        folders.refuse_unfit(own, address)
    first, authority = ((own / name).read_bytes() for name in (folders.CERTIFICATE, folders.AUTHORITY_CERTIFICATE))
    started(tmp_path, "head")
    assert (own / folders.CERTIFICATE).read_bytes() != first, "its addresses may be others"
    assert (own / folders.AUTHORITY_CERTIFICATE).read_bytes() == authority
    serves = started(tmp_path, "service")
    assert {"--certificate", "--key"} <= set(serves)
    assert serves[serves.index("--head") + 1] == "head:6379"
    assert "--insecure" in started(tmp_path, "service", "--insecure")


def test_a_service_without_certificates_and_authority_joins_in_the_clear(tmp_path: Path) -> None:
    """As in a cluster of Kubernetes in which something else encrypts."""
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "token").write_text("a" * 64)
    serves = started(tmp_path, "service", "--insecure")
    assert "--certificates" not in serves
    assert "--insecure" in serves


def test_what_a_head_knew_is_kept_when_it_dies_and_forgotten_when_its_machine_did(tmp_path: Path) -> None:
    """Nodes that died unheard would be believed alive for as long as a cut is borne."""
    secrets = set()
    known = tmp_path / "head" / "cluster" / "head-storage" / "of nodes and actors"
    for boot, is_kept in ((None, True), ("another start of the machine", False), (None, True)):
        started(tmp_path, "head")
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()
        if boot is not None:
            (tmp_path / "head" / "boot").write_text(boot)
        started(tmp_path, "head")
        assert known.exists() == is_kept
        secrets.add((tmp_path / "cluster" / "token").read_text())
    assert len(secrets) == 1
    assert (tmp_path / "cluster" / "authority" / folders.AUTHORITY_KEY).exists()
