"""A job's tape over HTTP: as events while it grows, with resume, and as a file."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.auth.permissions import Role
from api.client import Client
from api.http.eventstream import events_of, frames
from api.http.streams import SEATS_EACH
from api.routes.events import whole_lines
from api.run.records import CHUNK_BYTES, TapeReader, number_of, offset_after, sound_records
from api.schemas import TapeRecord
from api.terminal.record_text import EFFECTS, EVENTS, fields_of, sentence, tell
from orchestrator.core.effects import Effect
from orchestrator.core.events import CommandRequested, Event, IslandReported
from orchestrator.core.messages import CarriedReport
from orchestrator.errors import AtollError, InfrastructureError, NotFound, ServiceUnreachable, Unauthenticated
from orchestrator.tape.codec import REPORTED, REQUESTS, name_of
from orchestrator.tape.schema import CHECKSUM_AT_END
from orchestrator.tape.storage import TapeWriter, read_tape
from tests import forked
from tests.api.installation import ROOT, Installation, environment, interruptible
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def ended(service: Installation, client: Client) -> str:
    """A job that has ended."""
    job = client.submit(service.spec(steps=12)).job
    wait_until(lambda: client.job(job).report_ready)
    return job


def test_the_events_of_an_ended_job_are_its_tape_and_then_the_end(
    service: Installation, http: httpx.Client, client: Client, ended: str
) -> None:
    tape = read_tape(service.runs / ended / "tape.jsonl")
    told = list(client.events(ended))
    assert [record.n for record in told] == list(range(1, len(tape.records) + 1))
    assert [record.event["type"] for record in told] == [name_of(record.event) for record in tape.records]
    assert [len(record.effects) for record in told] == [len(record.effects) for record in tape.records]
    with http.stream("GET", f"/v1/jobs/{ended}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert list(events_of(answer.iter_lines()))[-1] == ("end", {"n": len(told)})


def test_events_resume_after_any_number_by_query_or_by_header(http: httpx.Client, client: Client, ended: str) -> None:
    count = len(list(client.events(ended)))
    for after in (1, 2, count // 2, count - 1, count, count + 5):
        assert [record.n for record in client.events(ended, after=after)] == list(range(after + 1, count + 1))
    headers = {"Last-Event-ID": str(count - 3)}
    with http.stream("GET", f"/v1/jobs/{ended}/events?after=1", headers=headers) as answer:
        numbers = [data["n"] for name, data in events_of(answer.iter_lines()) if name == "record"]
    assert numbers == [count - 2, count - 1, count]


def test_the_newest_events_are_read_without_those_that_are_routine(
    http: httpx.Client, client: Client, ended: str
) -> None:
    told = list(client.events(ended))

    def numbers(query: str) -> list[int]:
        with http.stream("GET", f"/v1/jobs/{ended}/events?{query}") as answer:
            return [data["n"] for name, data in events_of(answer.iter_lines()) if name == "record"]

    assert numbers("tail=7") == [record.n for record in told[-7:]]
    routine = {"ProgressReported", "TimerFired"}
    notable = [record.n for record in told if record.event["type"] not in routine]
    assert 0 < len(notable) < len(told)
    assert numbers("tail=9999&without=ProgressReported&without=TimerFired") == notable


def test_a_growing_job_is_followed_to_its_end(service: Installation, client: Client) -> None:
    job = client.submit(service.spec(steps=40)).job
    wait_until(lambda: client.job(job).global_version)
    first = list(client.events(job, follow=False))[-1].n
    with looked_at(service, job):
        seen = [record.n for record in client.events(job, after=first)]
    assert seen == list(range(first + 1, len(read_tape(service.runs / job / "tape.jsonl").records) + 1))
    assert len(seen) > 10


@contextmanager
def looked_at(service: Installation, job: str) -> Iterator[None]:
    """A job of the clockwork writes when somebody looks; until the block is left, somebody does."""
    over = threading.Event()

    def look() -> None:
        with service.client() as client:
            while not over.wait(0.1):
                client.job(job)

    looker = threading.Thread(target=look)
    looker.start()
    yield
    over.set()
    looker.join()


def test_a_job_that_is_not_there_has_no_events_and_no_tape(client: Client) -> None:
    with pytest.raises(NotFound, match="Job 'nope' does not exist"):
        list(client.events("nope"))


def test_too_many_streams_are_refused_and_each_that_ends_makes_room(service: Installation, client: Client) -> None:
    job = client.submit(service.spec()).job
    wait_until(lambda: list(client.events(job, follow=False)))
    streams = [client.events(job) for _ in range(SEATS_EACH)]
    for stream in streams:
        next(stream)
    with pytest.raises(InfrastructureError, match=f"follows {SEATS_EACH} event streams"):
        next(client.events(job))
    streams.pop().close()
    wait_until(lambda: there_is_room(client, job))
    for stream in streams:
        stream.close()
    client.cancel(job)


def test_a_stream_ends_soon_after_its_token_and_says_so_to_who_follows(service: Installation, client: Client) -> None:
    job = client.submit(service.spec()).job
    wait_until(lambda: list(client.events(job, follow=False)))
    for name, expires_in_s in (("leaver", None), ("guest", 6.0)):
        token = client.create_token(name, Role.VIEWER, expires_in_s=expires_in_s).token
        with service.http(token) as http, http.stream("GET", f"/v1/jobs/{job}/events") as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("retry")
            if expires_in_s is None:
                client.revoke_token(name)
            began, told = time.monotonic(), []
            for line in lines:
                assert time.monotonic() - began < PATIENCE_S, "it flows on"
                told.append(line)
        assert "event: end" not in told, "the job goes on"
    leaver = Client(client.url, token=client.create_token("other", Role.VIEWER).token)
    stream = leaver.events(job)
    next(stream)
    client.revoke_token("other")
    with looked_at(service, job), pytest.raises(ServiceUnreachable, match="before the job ended"):
        list(stream)
    with pytest.raises(Unauthenticated):
        next(leaver.events(job))
    leaver.close()
    client.cancel(job)


def there_is_room(client: Client, job: str) -> bool:
    try:
        return bool(list(client.events(job, follow=False)))
    except InfrastructureError:
        return False


def test_the_tape_is_downloaded_whole_or_by_range_and_whole_lines_while_it_grows(
    service: Installation, http: httpx.Client, client: Client, ended: str
) -> None:
    written = (service.runs / ended / "tape.jsonl").read_bytes()
    answer = http.get(f"/v1/jobs/{ended}/tape")
    assert answer.content == written
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert f"{ended}.tape.jsonl" in answer.headers["content-disposition"]
    part = http.get(f"/v1/jobs/{ended}/tape", headers={"Range": "bytes=10-19", "If-Range": answer.headers["etag"]})
    assert (part.status_code, part.content) == (206, written[10:20])

    job = client.submit(service.spec()).job
    wait_until(lambda: client.job(job).global_version)
    *lines, rest = http.get(f"/v1/jobs/{job}/tape").text.split("\n")
    assert not rest
    assert [json.loads(line)["n"] for line in lines[1:]] == list(range(1, len(lines)))
    client.cancel(job)


@pytest.fixture
def sealed(service: Installation, ended: str) -> Iterator[Path]:
    """The ended job's run folder, whose tape is three segments for the length of a test."""
    path = service.runs / ended / "tape.jsonl"
    tape = read_tape(path)
    path.rename(path.with_name("whole.jsonl"))
    with TapeWriter(path, tape.header) as writer:
        for record in tape.records:
            writer.append(record)
            if record.n in (20, 40):
                mark = writer.mark
                writer.seal(mark)
                writer.cut(mark)
    yield path.parent
    path.with_name("whole.jsonl").replace(path)
    shutil.rmtree(path.with_name("tape.sealed"))


def test_a_sealed_tape_is_downloaded_and_followed_as_the_one_file_that_it_was(
    http: httpx.Client, client: Client, ended: str, sealed: Path
) -> None:
    answer = http.get(f"/v1/jobs/{ended}/tape")
    assert CHECKSUM_AT_END.sub(b"}\n", answer.content) == (sealed / "whole.jsonl").read_bytes()
    assert f"{ended}.tape.jsonl" in answer.headers["content-disposition"]
    count = len(answer.content.splitlines()) - 2
    assert [record.n for record in client.events(ended, follow=False)] == list(range(1, count + 1))
    assert [record.n for record in client.events(ended, after=30, follow=False)] == list(range(31, count + 1))


def test_the_command_line_replays_a_sealed_tape_by_its_run_folder(sealed: Path) -> None:
    count = read_tape(sealed / "whole.jsonl").count
    assert f"identical: all {count:,} steps" in forked.atoll("replay", str(sealed)).stdout
    assert read_tape(sealed / "whole.jsonl").footer == read_tape(sealed / "tape.jsonl").footer


def test_a_damaged_segment_of_a_tape_is_named_instead_of_being_sent(
    http: httpx.Client, client: Client, ended: str, sealed: Path
) -> None:
    segment = sealed / "tape.sealed" / "00000001.zst"
    segment.write_bytes(segment.read_bytes()[:-5])
    answer = http.get(f"/v1/jobs/{ended}/tape")
    assert answer.status_code >= 400
    assert "00000001.zst is damaged" in answer.json()["detail"]
    with pytest.raises(AtollError, match=r"00000001\.zst is damaged"):
        list(client.events(ended, follow=False))


def test_a_job_that_wrote_nothing_yet_has_no_records_and_no_tape(
    service: Installation, http: httpx.Client, client: Client
) -> None:
    switch = service.home.path / "clockwork" / "jobs-are-silent"
    switch.touch()
    try:
        with pytest.raises(InfrastructureError):
            client.submit(service.spec())
        assert list(client.events("latest", follow=False)) == []
        refused = http.get("/v1/jobs/latest/tape")
        assert refused.status_code == 404
        assert "no readable tape" in refused.json()["detail"]
    finally:
        switch.unlink()


def test_a_job_that_could_not_be_started_has_no_records_and_ends_at_once(service: Installation, client: Client) -> None:
    switch = service.home.path / "clockwork" / "no-more-jobs"
    switch.touch()
    try:
        with pytest.raises(InfrastructureError):
            client.submit(service.spec())
    finally:
        switch.unlink()
    assert client.job("latest").state == "failed"
    assert list(client.events("latest")) == []


def test_open_streams_do_not_keep_the_service_from_ending(warm: Installation) -> None:
    with warm.client() as client:
        job = client.submit(warm.spec()).job
        wait_until(lambda: list(client.events(job, follow=False)))
        stream = client.events(job)
        next(stream)
        warm.atoll("down")
        assert "Finished server process" in warm.home.log.read_text(), "it ended by itself, and was not killed"
        with pytest.raises(ServiceUnreachable):
            list(stream)


def test_the_command_tells_every_record_and_after_ctrl_c_how_to_go_on(service: Installation, client: Client) -> None:
    job = client.submit(service.spec()).job
    wait_until(lambda: client.job(job).global_version)
    told = service.atoll("events", job).splitlines()
    assert "the job starts → place us-east on us-east" in told[0]
    assert any(
        re.search(r"contribution of asia to fragment \d: .* → admitted towards version \d", line) for line in told
    )
    assert json.loads(service.atoll("events", job, "--json", "--after", "3").splitlines()[0])["n"] == 4

    following = subprocess.Popen(
        service.command("events", job, "--follow"), cwd=ROOT, env=environment(), text=True, bufsize=1,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=interruptible,
    )  # fmt: skip
    assert following.stdout is not None
    assert "the job starts" in following.stdout.readline()
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 130
    assert re.search(rf"atoll events {job} --follow --after \d+", said), said
    assert "Traceback" not in said
    client.cancel(job)


# ── the pieces ────────────────────────────────────────────────────────────────────────────────────────────────────


def record_line(n: int, padding: int = 0) -> bytes:
    return b'{"n":%d,"event":{"type":"JobStarted","at":0.0,"x":"%s"},"effects":[]}' % (n, b"x" * padding)


def test_a_torn_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    reader = TapeReader(path)
    assert reader.read() == []
    path.write_bytes(b'{"schema":"atoll-tape/1"}\n' + record_line(1) + b"\n" + record_line(2)[:30])
    assert [number_of(line) for line in reader.read()] == [None, 1]
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(record_line(2)[30:] + b'\n{"end":2,"digest":"d"}\n')
    assert [number_of(line) for line in reader.read()] == [2, None]
    assert (reader.n, reader.sealed, reader.read()) == (2, True, [])


def tape_of(epoch: int, records: range) -> bytes:
    header = b'{"schema":"atoll-tape/1","job":"a-job","epoch":%d,"started_at":1.5,"policy":{}}' % epoch
    return b"".join(line + b"\n" for line in (header, *map(record_line, records)))


def test_a_follower_goes_on_with_the_tape_that_a_salvaged_job_begins(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    path.write_bytes(tape_of(1, range(1, 10)))
    follower, ahead = TapeReader(path), TapeReader(path, 9)
    assert [number_of(line) for line in follower.read()] == [None, *range(1, 10)]
    assert ahead.read() == []
    path.rename(tmp_path / "earlier")
    assert follower.read() == []
    path.write_bytes(tape_of(2, range(0))[:40])
    assert (follower.read(), follower.n) == ([], 9), "the header is not whole"
    path.write_bytes(tape_of(2, range(1, 4)))
    for reader in (follower, ahead):
        assert [number_of(line) for line in reader.read()] == [None, 1, 2, 3]
    with path.open("ab") as file:
        file.write(record_line(4) + b"\n")
    assert [number_of(line) for line in follower.read()] == [4]


@pytest.mark.parametrize(("epoch", "told"), [(1, []), (2, [1, 2, 3])])
def test_a_follower_that_is_ahead_of_a_tape_starts_again_only_where_the_tape_took_anothers_place(
    epoch: int, told: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "tape.jsonl"
    path.write_bytes(tape_of(epoch, range(1, 4)))
    assert [n for n, _ in sound_records(TapeReader(path, 9).read())] == told
    assert [n for n, _ in sound_records(TapeReader(path, 2).read())] == [3]


def test_a_download_stops_where_another_tape_takes_the_place_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    path.write_bytes(tape_of(1, range(1, 3)))
    reader = TapeReader(path)
    chunks = whole_lines(reader.read(), reader)
    assert next(chunks) == tape_of(1, range(1, 3))
    path.write_bytes(tape_of(2, range(1, 9)))
    assert list(chunks) == []


def test_a_line_longer_than_one_read_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    long = record_line(1, padding=2 * CHUNK_BYTES)
    path.write_bytes(b"header\n" + long + b"\n" + record_line(2) + b"\n")
    reader = TapeReader(path)
    assert [*reader.read(), *reader.read()] == [b"header", long, record_line(2)]


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 14), st.booleans(), st.integers(0, 40))
def test_the_place_after_any_record_is_the_one_that_reading_from_the_start_finds(
    paddings: list[int], after: int, sealed: bool, torn: int
) -> None:
    lines = [b'{"schema":"atoll-tape/1"}', *(record_line(n, p) for n, p in enumerate(paddings, start=1))]
    lines += [b'{"end":%d,"digest":"d"}' % len(paddings)] if sealed else []
    rest = b"" if sealed else record_line(len(paddings) + 1)[:torn]
    raw = b"".join(line + b"\n" for line in lines)
    expected = sum(len(line) + 1 for line in lines[: after + 1] if not line.startswith(b'{"end"'))
    assert offset_after(io.BytesIO(raw + rest), after, len(raw + rest)) == expected


def test_what_json_cannot_say_is_null_in_the_stream() -> None:
    line = b'{"n":7,"event":{"type":"EvaluationCompleted","at":1.0,"global_version":2,"loss":NaN},"effects":[]}'
    ((name, data),) = events_of(frames(sound_records([b"{}", line])).decode().split("\n"))
    assert (name, data["n"], data["event"]["loss"]) == ("record", 7, None)
    assert "held-out loss –" in tell(TapeRecord.model_validate(data))


def test_every_message_of_the_core_has_its_words_and_one_unknown_is_told_by_its_fields() -> None:
    events = set(get_args(Event)) - {CommandRequested, IslandReported}
    for kinds, forms in ((events, EVENTS), (get_args(Effect), EFFECTS)):
        for kind in kinds:
            assert kind.__name__ in forms
            assert fields_of(forms[kind.__name__]) <= {field.name for field in dataclasses.fields(kind)}
    for event, carried in ((CommandRequested, REQUESTS), (IslandReported, REPORTED)):
        about = {field.name for field in dataclasses.fields(event)}
        for name, kind in carried.items():
            assert fields_of(EVENTS.get(name, "")) <= about | {field.name for field in dataclasses.fields(kind)}
    assert REPORTED.keys() <= EVENTS.keys()
    assert set(REPORTED.values()) == set(get_args(CarriedReport))
    banish = {"type": "BanishRequested", "at": 1.5, "command": "c", "caller": "ada", "island": "x", "seconds": 2}
    assert sentence(EVENTS, banish) == "ada asks to banish island x seconds 2"
    assert sentence(EVENTS, {"type": "SomethingNew", "at": 1.5}) == "SomethingNew at=1.5"
    assert sentence(EVENTS, {"type": "IslandReady", "island": "x"}) == "IslandReady island=x"


def test_a_contribution_that_came_without_its_bytes_says_so_and_one_of_an_older_tape_does_not() -> None:
    contribution = {"island": "asia", "fragment": 3, "step_count": 24, "token_count": 2400, "base_version": 1}
    arrived = {"type": "ContributionArrived", "at": 1.5, "contribution": contribution}
    plain = "contribution of asia to fragment 3: 24 steps, 2,400 tokens on version 1"
    assert sentence(EVENTS, arrived) == sentence(EVENTS, arrived | {"displacement": 2.5}) == plain
    assert sentence(EVENTS, arrived | {"displacement": None}) == f"{plain}, too old for its bytes to be pulled"
