"""`/metrics`: the jobs' own totals, silent jobs left out, and nothing that grows with what callers make up."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.jobs.overseer import TAKEN_DOWN
from api.jobs.service import Service
from api.metrics import exposition as metrics
from api.metrics.catalogue import FAMILIES
from api.metrics.exposition import Metrics
from api.metrics.job import checkpoint_interval_s, samples
from api.run.folder import run_bytes
from api.schemas import JobState
from api.storage.store import Store
from orchestrator.accounting.goodput import CLASSES
from orchestrator.certificates import folders
from orchestrator.core import commands
from orchestrator.status import CheckpointFacts, FragmentNorms, JobStatus, StoreStatus
from tests.api.clockwork import connect
from tests.api.installation import Installation
from tests.harness.carried import RESIDUE_RATIO, add_lines
from tests.metrics.conftest import Voyaging
from tests.waiting import wait_until


class Exposition:
    """The text that Prometheus reads, asked about."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def all(self, name: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Values by the labels not asked for."""
        return {
            tuple(value for label, value in sample.labels.items() if label not in labels): sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }

    def one(self, name: str, **labels: str) -> float:
        (value,) = self.all(name, **labels).values()
        return value


class Desk:
    """A service at which a job of clockwork was submitted, without HTTP."""

    def __init__(self, folder: Path, steps: int = 20_000) -> None:
        self.control, self.store = connect(folder), Store(f"sqlite:///{folder / 'service.sqlite'}")
        self.service = Service(self.control, self.store, folder / "runs")
        self.job = self.service.submit(Installation(folder).spec(steps=steps), "me", None).job
        self.folder = folder

    def scrape(self) -> Exposition:
        """As a service would answer that was started this moment."""
        return Exposition(Metrics(self.service, self.store).exposition().decode())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    opened = Desk(tmp_path)
    yield opened
    opened.store.close()


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_totals_are_the_jobs_own_and_go_on_after_a_restart(desk: Desk) -> None:
    wait_until(lambda: desk.scrape().one("atoll_merges_total", atoll_job=desk.job, fragment="0") > 1)
    before, after = desk.scrape(), desk.scrape()
    for family in FAMILIES.values():
        if family.kind == "counter":
            for labels, value in before.all(f"{family.name}_total", atoll_job=desk.job).items():
                assert after.all(f"{family.name}_total", atoll_job=desk.job)[labels] >= value
    assert sum(before.all("atoll_tokens_merged_total", atoll_job=desk.job).values()) > 0


def test_the_size_of_a_run_is_counted_by_kind_and_links_lead_nowhere(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    sizes = {
        "tape.jsonl": 10,
        "tape.sealed/00000001.zst": 200,
        "journal/a.journal": 3000,
        "logs/islands/asia-1.log": 40_000,
        "checkpoints/1/asia/arrays": 500_000,
        "merged.safetensors": 6_000_000,
        "report.json": 7,
    }
    for name, size in {**sizes, "../elsewhere/large": 10**6}.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(bytes(size))
    (run / "logs" / "a link").symlink_to(elsewhere)
    counted = run_bytes(run)
    link = (run / "logs" / "a link").lstat().st_size
    assert counted == {
        "tape": 210,
        "journal": 3000,
        "logs": 40_000 + link,
        "checkpoints": 500_000,
        "parameters": 6_000_000,
        "other": 7,
    }
    assert sum(run_bytes(tmp_path / "missing").values()) == 0


def test_a_scrape_has_the_size_of_each_run_and_the_free_space_of_each_folder(desk: Desk) -> None:
    folders = [desk.folder, desk.folder / "missing"]
    told = Exposition(Metrics(desk.service, desk.store, folders=folders).exposition().decode())
    assert told.all("atoll_disk_free_bytes").keys() == {(str(desk.folder),)}
    assert told.one("atoll_disk_free_bytes", path=str(desk.folder)) == pytest.approx(
        shutil.disk_usage(desk.folder).free, rel=0.2
    )
    assert set(told.all("atoll_run_bytes", atoll_job=desk.job)) == {
        ("tape",),
        ("journal",),
        ("logs",),
        ("checkpoints",),
        ("parameters",),
        ("other",),
    }
    assert told.one("atoll_run_bytes", atoll_job=desk.job, kind="other") > 0


def test_every_island_second_is_in_one_class_and_they_add_up_to_the_jobs_age(desk: Desk) -> None:
    told = desk.scrape()
    seconds = told.all("atoll_island_seconds", atoll_job=desk.job, island="asia", region="asia")
    assert set(seconds) == {(name,) for name in CLASSES}
    assert sum(seconds.values()) == pytest.approx(told.one("atoll_job_age_seconds", atoll_job=desk.job))


def test_only_islands_that_train_have_a_place_in_the_schedule(desk: Desk) -> None:
    view = desk.control.status(desk.job)["view"]
    told = wait_until(
        lambda: (t := desk.scrape().all("atoll_island_schedule_step", atoll_job=desk.job)) and len(t) == 4 and t
    )
    assert {island for island, _ in told} == {island["island"] for island in view["islands"]}
    desk.service.submit_command(desk.job, commands.Kill("asia", restart=False), "me")
    wait_until(lambda: len(desk.scrape().all("atoll_island_schedule_step", atoll_job=desk.job)) == 3)


def test_a_histograms_buckets_hold_what_is_in_those_before_them(desk: Desk) -> None:
    told = wait_until(
        lambda: (t := desk.scrape()).one("atoll_merges_total", atoll_job=desk.job, fragment="0") > 1 and t
    )
    merges = sum(told.all("atoll_merges_total", atoll_job=desk.job).values())
    for name, labels in (
        ("atoll_round_part_seconds", {"part": "merging"}),
        ("atoll_merge_contributors", {}),
        ("atoll_journal_seconds", {}),
    ):
        buckets = told.all(f"{name}_bucket", atoll_job=desk.job, **labels)
        counts = [count for _, count in sorted((float(le), count) for (le,), count in buckets.items())]
        assert counts == sorted(counts)
        assert counts[-1] == told.one(f"{name}_count", atoll_job=desk.job, **labels) == merges


def test_a_job_that_does_not_answer_is_shown_as_silent_and_the_rest_is_there(desk: Desk) -> None:
    (desk.folder / "clockwork" / "jobs-are-silent").touch()
    told = desk.scrape()
    assert told.one("atoll_job_answers", atoll_job=desk.job) == 0
    assert told.one("atoll_jobs", state="running") == 1
    assert told.all("atoll_goodput_ratio") == {}


def test_a_job_that_hangs_delays_no_scrape_beyond_its_patience(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PATIENCE_S", 0.1)
    released, asked = threading.Event(), []

    def hang(job: str) -> Any:
        asked.append(job)
        released.wait()
        raise AssertionError("nobody waits for this")

    monkeypatch.setattr(desk.control, "status", hang)
    monkeypatch.setattr(metrics, "FRESH_S", 0.0)
    registry = Metrics(desk.service, desk.store)
    for _ in range(3):
        assert Exposition(registry.exposition().decode()).one("atoll_job_answers", atoll_job=desk.job) == 0
    assert len(asked) == 1, "it is not asked again while it has not answered"
    released.set()


def test_an_ended_job_is_shown_until_its_last_figures_were_scraped(tmp_path: Path) -> None:
    desk = Desk(tmp_path, steps=10)
    ended = wait_until(lambda: (told := desk.scrape()).one("atoll_jobs", state="completed") == 1 and told)
    assert ended.one("atoll_job_phase", atoll_job=desk.job, phase="finished") == 1
    assert desk.service.job(desk.job).state == "completed"
    assert desk.scrape().one("atoll_job_phase", atoll_job=desk.job, phase="finished") == 1
    long_ago = time.time() - metrics.LINGER_S - 1
    os.utime(tmp_path / "runs" / desk.job / "status.json", (long_ago, long_ago))
    assert desk.scrape().all("atoll_job_phase") == {}
    assert desk.scrape().one("atoll_jobs", state="completed") == 1
    desk.store.close()


FAILED = "atoll_job_failed_timestamp_seconds"


def test_each_end_of_a_job_is_counted_once_and_a_failed_job_is_named_until_it_is_deleted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "FRESH_S", 0.0)
    registry = Metrics(desk.service, desk.store)

    def scrape() -> Exposition:
        return Exposition(registry.exposition().decode())

    assert set(scrape().all("atoll_jobs_ended_total").values()) == {0.0}, "a rise from zero must be visible as one"
    desk.store.move_job(desk.job, "running", "failed", reason="its disk is gone", last_known={"epoch": 1})
    before = time.time()
    for _ in range(2):
        told = scrape()
        assert told.one("atoll_jobs_ended_total", state="failed", reason="not_restarted") == 1
        assert before <= told.one(FAILED, atoll_job=desk.job) <= time.time()
    started_later = desk.scrape()
    assert set(started_later.all("atoll_jobs_ended_total").values()) == {0.0}, "it failed before that process started"
    assert started_later.one(FAILED, atoll_job=desk.job, reason="not_restarted") <= before + 1

    row = desk.store.job(desk.job)
    assert row is not None
    again = desk.service.submit(Installation(desk.folder).spec(), "me", None).job
    desk.store.update_job(again, spec={**row.spec, "resume": {"checkpoint": f"{row.run_dir}/checkpoints/000003"}})
    assert scrape().all(FAILED) == {}, "somebody has seen to it"
    desk.store.remove_job(again)
    assert scrape().all(FAILED) != {}
    monkeypatch.setattr(metrics, "FAILED_SHOWN_S", 0.0)
    assert scrape().all(FAILED) == {}
    monkeypatch.undo()
    monkeypatch.setattr(metrics, "FRESH_S", 0.0)
    desk.store.remove_job(desk.job)
    told = scrape()
    assert told.all(FAILED) == {}
    assert told.one("atoll_jobs_ended_total", state="failed", reason="not_restarted") == 1


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        ({"crash.txt": "a bug"}, "crash"),
        ({"tape.jsonl": "{}"}, "not_restarted"),
        ({}, "not_started"),
    ],
)
def test_a_failed_job_says_what_ended_it(desk: Desk, left: dict[str, str], reason: str) -> None:
    row = desk.store.job(desk.job)
    assert row is not None
    folder = desk.folder / "left"
    folder.mkdir()
    for name, content in left.items():
        (folder / name).write_text(content)
    row.run_dir, row.state, row.last_known = str(folder), "failed", None
    assert metrics.ending_reason(row, JobState.FAILED, None) == reason
    row.reason = f"{TAKEN_DOWN} Submit it again."
    assert metrics.ending_reason(row, JobState.FAILED, None) == ("crash" if reason == "crash" else "taken_down")


def test_the_head_and_its_nodes_are_shown_and_a_head_that_is_gone_is_down(desk: Desk) -> None:
    told = wait_until(lambda: (t := desk.scrape()).all("atoll_islands_wanted") and t)
    assert told.one("atoll_head_up") == 1
    nodes = told.all("atoll_nodes")
    assert set(nodes) == {(name, name) for name in ("us-east", "us-west", "europe", "asia")}
    assert told.all("atoll_nodes_leaving") == told.all("atoll_nodes_down") == dict.fromkeys(nodes, 0.0)
    assert told.all("atoll_nodes_cordoned") == dict.fromkeys(nodes, 0.0)
    assert told.all("atoll_islands_wanted") == {(name,): 1.0 for name, _ in nodes}
    assert told.all("atoll_islands_waiting") == {(name,): 0.0 for name, _ in nodes}
    (desk.folder / "clockwork" / "cluster-is-gone").touch()
    gone = desk.scrape()
    assert gone.one("atoll_head_up") == 0
    assert gone.all("atoll_nodes") == {}


def test_the_certificate_of_the_service_is_shown_with_its_end_and_a_damaged_one_breaks_no_scrape(
    desk: Desk, tmp_path: Path
) -> None:
    folders.make_authority(tmp_path / "authority", "fleet")
    folders.issue(tmp_path / "authority", tmp_path / "machine", ["localhost"], 30)
    certificate = tmp_path / "machine" / "tls.crt"
    registry = Metrics(desk.service, desk.store, certificate)
    told = Exposition(registry.exposition().decode())
    left_s = told.one("atoll_certificate_expiry_timestamp_seconds", place="service") - time.time()
    assert left_s == pytest.approx(30 * 86400, abs=3600)
    assert told.one("atoll_certificate_lifetime_seconds", place="service") == pytest.approx(30 * 86400, abs=2 * 86400)
    certificate.write_text("damaged")
    told = Exposition(Metrics(desk.service, desk.store, certificate).exposition().decode())
    assert told.all("atoll_certificate_expiry_timestamp_seconds") == {}
    assert told.one("atoll_head_up") == 1


def test_a_head_that_answers_is_up_though_its_certificates_cannot_be_read(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk.control, "certificates", lambda: 1 / 0)
    told = desk.scrape()
    assert told.one("atoll_head_up") == 1
    assert told.all("atoll_certificate_expiry_timestamp_seconds") == {}


def test_checkpoints_are_expected_as_often_as_the_specification_says(desk: Desk) -> None:
    record = wait_until(lambda: (r := desk.control.status(desk.job))["view"]["global_version"] > 3 and r)
    status = JobStatus.model_validate(record)
    mean_s = status.at / status.view.global_version
    for section, interval_s in (
        (None, None),
        ({"every_merges": 0, "every_s": 0.0}, None),
        ({"every_merges": 10, "every_s": 0.0}, pytest.approx(10 * mean_s)),
        ({"every_merges": 10**9, "every_s": 60.0}, pytest.approx(60.0)),
    ):
        assert checkpoint_interval_s(section, status) == interval_s


def test_age_size_and_failures_of_checkpoints_are_exported(desk: Desk) -> None:
    row = desk.store.job(desk.job)
    assert row is not None
    status = JobStatus.model_validate(desk.control.status(desk.job))

    def exported(**facts: Any) -> dict[str, Any]:
        shown = samples(status.with_view(checkpoint=CheckpointFacts(**facts)), row.spec)
        return {
            sample.family.removeprefix("atoll_checkpoint_"): sample.value
            for sample in shown
            if "checkpoint" in sample.family
        }

    assert exported() == {"failures": 0}
    assert exported(scheduled=True, failures=2) == {"failures": 2, "age_seconds": status.at, "bytes": 0}
    taken_at = status.at - 30.0
    assert exported(taken_at=taken_at, bytes=5) == {"failures": 0, "age_seconds": pytest.approx(30.0), "bytes": 5}


def test_a_record_of_an_earlier_build_is_shown_as_far_as_it_goes(desk: Desk) -> None:
    record = json.loads(json.dumps(desk.control.status(desk.job)))
    for name in ("traffic", "round_seconds", "journal_seconds"):
        del record["statistics"][name]
    row = desk.store.job(desk.job)
    assert row is not None
    shown = {sample.family for sample in samples(JobStatus.model_validate(record), row.spec)}
    assert "atoll_merges" in shown
    assert not shown & {
        "atoll_contributions",
        "atoll_round_part_seconds",
        "atoll_journal_seconds",
        "atoll_journal_failing",
        "atoll_payload_bytes",
        "atoll_line_busy_seconds",
        "atoll_fragment_update_norm",
    }


def test_bytes_are_those_that_lines_carried_under_the_codec_that_they_were_in(desk: Desk) -> None:
    wait_until(lambda: desk.scrape().one("atoll_merges_total", atoll_job=desk.job, fragment="0") > 1)
    row, record = desk.store.job(desk.job), desk.control.status(desk.job)
    assert row is not None
    add_lines(record)
    record["lines"]["islands"]["asia"]["trouble"] = "nothing comes from there"
    spec = {**row.spec, "synchroniser": {**row.spec["synchroniser"], "wire": {"up": "int8", "down": "int4"}}}
    shown = {
        (sample.family, sample.labels[1:]): sample.value for sample in samples(JobStatus.model_validate(record), spec)
    }
    lines = record["lines"]["islands"]
    for island, line in lines.items():
        at = (island, island)  # these regions have the names of their islands
        assert line["up_bytes"] > 0
        assert shown["atoll_payload_bytes", (*at, "up", "contribution", "int8")] == line["up_bytes"]
        assert shown["atoll_payload_bytes", (*at, "down", "update", "int4")] == line["down_bytes"]["update"]
        assert shown["atoll_payload_bytes", (*at, "down", "state", "float32")] == line["down_bytes"]["state"]
        assert shown["atoll_line_busy_seconds", (*at, "down")] == line["down_busy_seconds"]
        assert shown["atoll_line_queued_bytes", at] == line["queued_bytes"]
        assert shown["atoll_line_hindered", at] == (island == "asia")
    assert shown["atoll_fragment_residue_ratio", ("0",)] == RESIDUE_RATIO


def test_a_fragment_that_did_not_move_owes_no_share_of_its_update(desk: Desk) -> None:
    row, record = desk.store.job(desk.job), desk.control.status(desk.job)
    assert row is not None
    record["fragment_norms"] = [FragmentNorms(fragment=0, version=1, update_norm=0.0, residue_norm=1.0)]
    shown = {sample.family for sample in samples(JobStatus.model_validate(record), row.spec)}
    assert "atoll_fragment_update_norm" in shown
    assert "atoll_fragment_residue_ratio" not in shown


def test_a_mixture_shows_its_routers_and_experts_and_other_models_show_none(desk: Desk) -> None:
    row, record = desk.store.job(desk.job), desk.control.status(desk.job)
    assert row is not None
    figures = {"expert_share_max": 0.5, "expert_entropy_ratio": 0.75, "adoptions": 3}
    record["statistics"]["mixture"] = {
        "routers": [{"fragment": 1, "merges": 2, "distance": 3.0, "travel": 4.0}],
        "islands": {
            "asia": {**figures, "loss_before": 2.5, "loss_after": 2.625},
            "europe": {**figures, "adoptions": 0, "loss_before": None, "loss_after": None},
        },
    }

    def shown() -> dict[tuple[str, str], float]:
        every = samples(JobStatus.model_validate(record), row.spec)
        names = ("router", "expert", "_adoption_nats")
        return {(one.family, one.labels[1]): one.value for one in every if any(name in one.family for name in names)}

    of_islands = {("atoll_island_expert_share_max_ratio", name): 0.5 for name in ("asia", "europe")}
    of_islands |= {("atoll_island_expert_entropy_ratio", name): 0.75 for name in ("asia", "europe")}
    assert shown() == of_islands | {
        ("atoll_island_loss_before_adoption_nats", "asia"): 2.5,
        ("atoll_island_loss_after_adoption_nats", "asia"): 2.625,
        ("atoll_fragment_router_distance", "1"): 3.0,
        ("atoll_fragment_router_travel", "1"): 4.0,
    }
    del record["statistics"]["mixture"]
    assert shown() == {}


def test_a_disk_that_refuses_the_journal_is_told_until_it_takes_it(desk: Desk) -> None:
    row, record = desk.store.job(desk.job), desk.control.status(desk.job)
    assert row is not None
    for trouble, value in ((None, False), ("the journal cannot be written: No space left", True)):
        told = {
            sample.family: sample.value
            for sample in samples(JobStatus.model_validate({**record, "disk_trouble": trouble}), row.spec)
        }
        assert told["atoll_journal_failing"] == value
        assert "atoll_store_failing" not in told, "the job is not mirrored"


def test_the_store_of_a_mirrored_job_is_told_beside_the_disk(desk: Desk) -> None:
    row, record = desk.store.job(desk.job), desk.control.status(desk.job)
    assert row is not None
    for trouble, value in ((None, False), ("the store s3://logs has not answered for 6 s", True)):
        store = StoreStatus(puts=3, put_bytes=70, put_seconds=0.5, trouble=trouble).model_dump()
        status = JobStatus.model_validate({**record, "disk_trouble": None, "store": store})
        told = {sample.family: sample.value for sample in samples(status, row.spec)}
        assert told["atoll_store_failing"] == value
        assert not told["atoll_journal_failing"], "a page for the disk would send somebody to the wrong machine"
        figures = [told[f"atoll_store_{name}"] for name in ("puts", "put_bytes", "put_seconds")]
        assert figures == [3, 70, 0.5]


def test_a_synchroniser_that_was_replaced_from_elsewhere_is_told(desk: Desk) -> None:
    row, record = desk.store.job(desk.job), desk.control.status(desk.job)
    assert row is not None
    for fenced, value in ((None, False), ("this synchroniser was replaced and has stopped", True)):
        status = JobStatus.model_validate({**record, "fenced": fenced})
        told = {sample.family: sample.value for sample in samples(status, row.spec)}
        assert told["atoll_synchroniser_fenced"] == value
    earlier = JobStatus.model_validate({name: value for name, value in record.items() if name != "fenced"})
    assert "atoll_synchroniser_fenced" not in {sample.family for sample in samples(earlier, row.spec)}


# ── over HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_family_of_the_catalogue_is_exported_with_its_labels_and_help(voyaging: Voyaging) -> None:
    told = Exposition(wait_until(lambda: "atoll_recovery_part" in (text := voyaging.metrics()) and text))
    absent = {"atoll_held_out_bits_per_byte", "atoll_held_out_source_loss_nats"}  # a simulated job has no text,
    absent |= {"atoll_held_out_preference_accuracy_ratio", "atoll_held_out_preference_margin_nats"}
    absent |= {"atoll_autopilot_gain_ratio", "atoll_autopilot_look_timestamp_seconds"}  # no autopilot,
    absent |= {name for name in FAMILIES if "expert" in name or "router" in name or "_adoption_nats" in name}
    absent |= {"atoll_job_failed_timestamp_seconds"}  # and neither failures nor checkpoints
    absent |= {f"atoll_checkpoint_{of}" for of in ("interval_seconds", "age_seconds", "bytes")}
    for family in (family for family in FAMILIES.values() if family.name not in absent):
        assert family.name in told.families, family.name
        exported = told.families[family.name]
        assert (exported.type, exported.documentation) == (family.kind, family.help)
        for sample in exported.samples:
            assert set(sample.labels) - {"le"} == set(family.labels)


def test_requests_are_told_apart_by_route_and_never_by_path(voyaging: Voyaging) -> None:
    headers = {"Authorization": f"Bearer {voyaging.credentials.read_text().strip()}"}
    with httpx.Client(base_url=voyaging.url, headers=headers) as client:
        for number in range(5):
            client.get(f"/v1/jobs/job-{number}")
            client.get(f"/nonsense-{number}")
            client.request(f"NONSENSE{number}", "/v1/jobs")
    told = Exposition(voyaging.metrics()).all("atoll_api_request_seconds_count")
    named = {value for labels in told for value in labels}
    assert {"/v1/jobs/{job}", "(none)", "other", "4xx"} <= named
    assert not any("job-" in value or "nonsense" in value.lower() for value in named)


def test_figures_need_a_token(voyaging: Voyaging) -> None:
    assert httpx.get(f"{voyaging.url}/metrics").status_code == 401
