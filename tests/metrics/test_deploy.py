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
from orchestrator.runtime.settings import CONTROL_GROUP, GROUP_LABEL, REGION_LABEL
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
import json, os, pathlib, runpy, sys
node = runpy.run_path(sys.argv[1])
its = node["main"].__globals__
places = {"SECRET": "token", "AUTHORITY": "authority", "OWN": "own", "HEAD_STORAGE": "storage"}
its |= {place: pathlib.Path(sys.argv[2], name) for place, name in places.items()}
its["RAY"] = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
its["main"](["head"])
"""
"""The head's container as far as Ray, in whose place something says what it was given."""

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
    ray = NODE.ray_arguments(options)
    labels = ray[ray.index("--labels") + 1] if "--labels" in ray else ""
    if options.what == "island":
        assert labels == f"{GROUP_LABEL}={name},{REGION_LABEL}={options.region}"
    else:
        assert labels == (f"{GROUP_LABEL}={CONTROL_GROUP}" if name == "head" else "")
    assert str(NODE.SECRET.parent) in [target for _, target, *_ in mounts(OURS[name])]


def test_synchronisers_islands_and_service_see_the_same_runs() -> None:
    for name in ("head", "us-east", "europe", "api"):
        assert "runs:/var/lib/atoll/runs" in OURS[name]["volumes"], name
    assert str(NODE.RUNS) == "/var/lib/atoll/runs"


def head_as_started(folder: Path) -> dict[str, str]:
    """What Ray is given, in its environment, of a head that keeps its things in this folder."""
    command = [sys.executable, "-c", STARTED, str(DEPLOY / "node.py"), str(folder)]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout
    given: dict[str, str] = json.loads(said)
    return given


def test_a_container_whose_packages_would_shadow_a_module_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "queue.py").touch()
    command = [sys.executable, "-I", str(DEPLOY / "node.py"), "head"]
    given = os.environ | {user_packages.VARIABLE: str(tmp_path)}
    begun = subprocess.run(command, env=given, capture_output=True, text=True, timeout=PATIENCE_S)
    assert begun.returncode == 2
    assert "'queue' (of Python's library)" in begun.stderr


def test_a_container_issues_its_own_certificate_by_the_heads_authority_and_speaks_tls_with_it(tmp_path: Path) -> None:
    folders.make_authority(tmp_path / "authority", "of a composition that was made years ago", days=3)
    given = head_as_started(tmp_path)
    own = tmp_path / "own"
    assert (given["RAY_USE_TLS"], given["RAY_TLS_SERVER_KEY"]) == ("1", str(own / folders.KEY))
    for address in ("head", "127.0.0.1"):
        folders.refuse_unfit(own, address)
    first, authority = ((own / name).read_bytes() for name in (folders.CERTIFICATE, folders.AUTHORITY_CERTIFICATE))
    head_as_started(tmp_path)
    assert (own / folders.CERTIFICATE).read_bytes() != first, "its addresses may be others"
    assert (own / folders.AUTHORITY_CERTIFICATE).read_bytes() == authority
    assert NODE.encryption(insecure=True) == ["--insecure"]
    assert NODE.encryption(insecure=False)[::2] == ["--certificate", "--key"]


def test_what_a_head_knew_is_kept_when_it_dies_and_forgotten_when_its_machine_did(tmp_path: Path) -> None:
    """Nodes that died unheard would be believed alive for as long as a cut is borne."""
    head_as_started(tmp_path)
    assert (tmp_path / "authority" / folders.AUTHORITY_KEY).exists()
    known = tmp_path / "storage" / "of nodes and actors"
    known.parent.mkdir()
    known.touch()
    head_as_started(tmp_path)
    assert known.exists()
    (tmp_path / "boot").write_text("another start of the machine")
    head_as_started(tmp_path)
    assert not known.exists()
    known.parent.mkdir()
    known.touch()
    head_as_started(tmp_path)
    assert known.exists()


def test_a_head_that_was_killed_finds_what_it_knew_on_a_volume_that_nobody_else_writes(tmp_path: Path) -> None:
    given = head_as_started(tmp_path)
    assert (given["RAY_gcs_storage"], given["RAY_gcs_storage_path"]) == ("rocksdb", str(tmp_path / "storage"))
    kept = Path(NODE.environment_of("head")["RAY_gcs_storage_path"])
    (mount,) = [mount for mount in mounts(OURS["head"]) if kept.is_relative_to(mount[1])]
    assert kept.parent == Path(mount[1]), "Ray makes one folder, and not those above it"
    assert (mount[0] in COMPOSE["volumes"], mount[2:]) == (True, [])
    assert [name for name, service in SERVICES.items() if mount[0] in [m[0] for m in mounts(service)]] == ["head"]
    assert any(f" {mount[1]} " in run and "--owner atoll" in run for run in arguments("RUN")), "whose a new volume is"
    for part in ("island", "service"):
        assert not [name for name in NODE.environment_of(part) if "storage" in name]


def test_the_head_is_killed_for_one_that_is_asked_to_end_leaves_actors_that_are_believed_alive() -> None:
    assert OURS["head"]["stop_signal"] == "SIGKILL"
    assert [name for name, service in SERVICES.items() if "stop_signal" in service] == ["head"], (
        "others end as they want"
    )


def test_the_service_is_scraped_where_it_listens_with_a_token_that_is_there() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": [f"127.0.0.1:{NODE.SERVICE_PORT}"]}]
    assert SERVICES["prometheus"]["network_mode"] == "service:api"
    folder, _, file = scraped["authorization"]["credentials_file"].partition("/")
    assert f"credentials:/etc/prometheus/{folder}:ro" in SERVICES["prometheus"]["volumes"]
    assert f"mv draft {file}" in SERVICES["viewer-token"]["command"][0]
    assert "--role viewer" in SERVICES["viewer-token"]["command"][0]


def test_grafana_is_given_the_dashboards_and_prometheus() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in SERVICES["prometheus"]["command"]
    assert SERVICES["prometheus"]["network_mode"] == SERVICES["grafana"]["network_mode"] == "service:api"
    assert "127.0.0.1:3000:3000" in SERVICES["api"]["ports"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "atoll.yaml").read_text())["providers"]
    assert f"../dashboards:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (ROOT / "dashboards" / home.name).is_file()
