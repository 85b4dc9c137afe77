"""`atoll profile` and its routes, against a service whose islands complete a trace at the second look."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from api.commands import islands
from api.commands.common import draft_of
from api.schemas import Profile
from orchestrator.errors import ConfigurationError, Conflict, NotFound, ServiceUnreachable
from tests.api.clockwork import TRACE
from tests.api.installation import ROOT, Installation, environment, interruptible
from tests.waiting import PATIENCE_S, wait_until


def training_job(service: Installation) -> str:
    job = service.atoll("submit", service.spec_file()).split()[1].rstrip(":")
    wait_until(lambda: json.loads(service.atoll("status", job, "--json"))["islands_training"] == 4)
    return job


def test_a_trace_becomes_a_folder_and_a_second_never_overwrites_it(service: Installation, tmp_path: Path) -> None:
    job, target = training_job(service), tmp_path / "new" / "trace"
    said = service.atoll("profile", job, "asia", "--steps", "3", "--out", str(target))
    assert f"wrote {target} with 3 steps, 1.5 s of asia, which stood still for 0.25 s" in said
    assert "plugins/profile/run/host.trace.json.gz" in said
    assert (target / "plugins/profile/run/host.xplane.pb").read_bytes() == b"planes" * 100
    assert "already exists" in service.atoll("profile", job, "asia", "--out", str(target), code=2)
    assert "--steps '0' is not a whole number of at least 1" in service.atoll(
        "profile", job, "asia", "--steps", "0", code=2
    )
    assert "steps: is 101, but must be at most 100" in service.atoll(
        "profile", job, "asia", "--steps", "101", "--out", str(tmp_path / "none"), code=2
    )
    assert [path.name for path in target.parent.iterdir()] == ["trace"]
    problem = service.home.path / "clockwork" / "profile-problem"
    problem.write_text("The profiler failed: no room.")
    said = service.atoll("profile", job, "asia", "--out", str(tmp_path / "other"), code=1)
    assert "no trace of island asia: The profiler failed: no room." in said
    problem.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_what_cannot_be_traced_is_said_in_a_sentence(service: Installation, tmp_path: Path) -> None:
    job = training_job(service)
    assert f"Job {job} has no island 'mars'" in service.atoll("profile", job, "mars", code=2)
    service.atoll("kill", job, "asia", "--stay-down")
    wait_until(lambda: "stopped" in service.atoll("islands", job))
    assert "is stopped, not training, so it takes no steps" in service.atoll("profile", job, "asia", code=1)
    service.atoll("cancel", job)
    wait_until(lambda: json.loads(service.atoll("status", job, "--json"))["state"] == "cancelled")
    assert "already cancelled" in service.atoll("profile", job, "europe", code=1)


def test_the_routes_are_idempotent_by_name(service: Installation, http: httpx.Client) -> None:
    path = f"/v1/jobs/{training_job(service)}/islands/asia/profiles/mine"
    assert http.get(path).status_code == 404
    first = http.post(path, json={"steps": 2})
    assert (first.status_code, first.json()["steps_taken"], first.json()["byte_count"]) == (202, 0, None)
    assert http.post(path, json={"steps": 2}).json()["byte_count"] == len(TRACE)
    assert http.get(f"{path}/trace").content == TRACE
    for body in ({"steps": 101}, {"steps": 2.5}, {"steps": True}, {"step": 2}):
        assert http.post(path, json=body).status_code == 422, body
    assert http.post(path.replace("mine", "a b"), json={}).status_code == 422


def test_ctrl_c_cancels_the_recording_that_nobody_waits_for_any_more(service: Installation, tmp_path: Path) -> None:
    job, place = training_job(service), service.home.path / "clockwork"
    (place / "profile-waits").touch()
    waiting = subprocess.Popen(
        service.command("profile", job, "asia", "--out", str(tmp_path / "out")),
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    )
    wait_until(lambda: list(place.glob(f"{job}-asia-*")))
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=PATIENCE_S)
    (place / "profile-waits").unlink()
    assert waiting.returncode == 130, said
    assert "cancelled the recording; asia trains on" in said
    assert (place / "profile-cancelled").read_text() in str(list(place.glob(f"{job}-asia-*")))
    assert list(tmp_path.iterdir()) == []


def test_only_a_recording_that_is_known_is_cancelled_and_that_twice(service: Installation, http: httpx.Client) -> None:
    path = f"/v1/jobs/{training_job(service)}/islands/asia/profiles/mine"
    assert http.delete(path).status_code == 404
    assert http.post(path, json={"steps": 2}).status_code == 202
    for _ in range(2):
        assert http.delete(path).json()["problem"] == "It was cancelled."


def test_a_name_that_no_path_can_have_is_refused_before_it_leads_elsewhere(
    service: Installation, tmp_path: Path
) -> None:
    job, out = training_job(service), str(tmp_path / "out")
    for name in ("", ".", "..", "a/b", "../europe"):
        for words in (
            ("profile", job, name, "--out", out),
            ("profile", name, "asia", "--out", out),
            ("kill", job, name),
            ("drain", job, name),
            ("status", name),
            ("logs", job, name),
            ("cordon", name),
            ("cordon", "europe", "--node", name),
        ):
            assert f"{name!r} is not a name" in service.atoll(*words, code=2), words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    program = (
        "import signal, sys; from pathlib import Path; from api.commands.common import draft_of\n"
        "with draft_of(Path(sys.argv[1]), '.draft-') as (here, whole):\n"
        "    whole.mkdir(); print('begun', flush=True); signal.pause()\n"
    )
    target = tmp_path / "new" / "trace"
    command = [sys.executable, "-c", program, str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=interruptible)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(number)
    process.communicate()
    assert process.returncode in (128 + number, -number)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_has_a_sentence_and_gets_no_folders_above_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigurationError, match=r"cannot be written: Not a directory\. Move the file away"),
        draft_of(tmp_path / "file" / "trace", ".draft-"),
    ):
        pytest.fail("nothing is recorded for a folder that cannot be")
    with (
        pytest.raises(ConfigurationError, match=r"cannot be written: No space left on device\. Free some space"),
        draft_of(tmp_path / "new" / "trace", ".draft-"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class Restarting:
    """Stands for a service that does not answer some looks, and then completes the trace, or no longer knows it."""

    def __init__(self, *answers: Profile | Exception) -> None:
        self.answers = list(answers)

    def profile(self, job: str, island: str, profile: str) -> Profile:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_service_that_restarts_meanwhile_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(islands, "PROFILE_POLL_S", 0.0)
    begun = Profile(
        profile="one", job="job-1", island="asia", incarnation=1, steps=3, steps_taken=0, seconds=0.0, stalled_s=0.0,
        byte_count=None, problem="",
    )  # fmt: skip
    whole, away = begun.model_copy(update={"byte_count": 5}), ServiceUnreachable(detail="away")
    assert islands._recorded(Restarting(away, begun, away, whole), begun) == whole
    with pytest.raises(Conflict, match="has ended"):
        islands._recorded(Restarting(away, NotFound(detail="Its process has ended.")), begun)
    monkeypatch.setattr(islands, "SILENCE_S", -1.0)
    with pytest.raises(ServiceUnreachable):
        islands._recorded(Restarting(away, whole), begun)
