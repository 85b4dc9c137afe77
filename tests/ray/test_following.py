"""A follower's folder is the synchroniser's Θ, bit for bit, from updates, whatever interrupts it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest

from api.run.following import CURRENT, OWN, Followed, follow
from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import (
    CloseReason,
    Epoch,
    FragmentId,
    IslandId,
    PayloadId,
    Version,
    WeightedPayload,
)
from orchestrator.errors import ConfigurationError, NotFound, ServiceUnreachable
from orchestrator.host.records import final_updates
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.huggingface import export as huggingface
from orchestrator.parameters import fragment_map, tensors, wire_format
from orchestrator.parameters.codec.registry import CodecName
from orchestrator.parameters.journal import Journal
from orchestrator.parameters.outer_optimizer import Nesterov
from orchestrator.parameters.outer_state import Averaging, OuterState, OuterStep
from orchestrator.parameters.pieces import Shape
from orchestrator.parameters.shard import ParameterShard, Publication
from orchestrator.specification.config import parse_job
from orchestrator.specification.training_sections import BUILT_IN_TRAINER
from tests.ray.jobs import synthetic
from tests.ray.test_published import published

if TYPE_CHECKING:
    from orchestrator.runtime.published import Published

Result = TypeVar("Result")
DECODER = {"width": 64, "layer_count": 2, "head_count": 2, "key_value_head_count": 1, "head_size": 32}
SPEC = parse_job(
    {**synthetic(100), "trainer": BUILT_IN_TRAINER, "model": {"decoder": {**DECODER, "hidden_size": 128}}}
).model_dump(mode="json")
FRAGMENTS = 3
BFLOAT16_BYTES = 2


class Killed(BaseException):
    """The follower's process is gone."""


class Job:
    """A job's shard, which merges when it is told to, and its service, which fails when it is told to."""

    def __init__(self, folder: Path, codec: CodecName = "int4") -> None:
        folder.mkdir()
        self.folder, self.codec, self._random = folder, codec, np.random.default_rng(1)
        network = DecoderSection.model_validate(SPEC["model"]["decoder"])
        whole = {
            name: self._random.standard_normal(shape, dtype=np.float32)
            for name, shape in parameter_shapes(network).items()
        }
        self.parameter_count = sum(array.size for array in whole.values())
        names = fragment_map.build(tensors.shapes(whole), FRAGMENTS)
        step = OuterStep(Averaging.MEAN, Nesterov(0.7, 0.9), codec)
        self.shard = ParameterShard(Journal(folder / "journal"), Epoch(1), lambda _, work: work())
        self._published: dict[FragmentId, Published] = {}
        first = OuterState(fragment_map.pieces_of(whole, names), names, step)
        for version in self.shard.seed(first, {}):
            self._publish(version.publication)
        self.trouble: Callable[[], None] = lambda: None
        self.kill_after = self.chunk_bytes = 1 << 40
        self.ended = False
        self.asked: list[tuple[int, ...]] = []

    # ── as the shard's worker ─────────────────────────────────────────────────────────────────────────────────────

    def all_published(self) -> list[Any]:
        return [self._published[p] for p in sorted(self._published)]

    def shapes(self) -> list[Mapping[str, Shape]]:
        return [tensors.shapes(self.shard.state(p).parameters) for p in self.shard.fragments]

    def patiently(self, work: Callable[[], Result]) -> Result:
        return work()

    def merge(self, fragment: int) -> None:
        p = FragmentId(fragment)
        state = self.shard.state(p)
        learned = {n: 0.01 * self._random.standard_normal(a.shape, np.float32) for n, a in state.parameters.items()}
        payload, version = PayloadId(f"{p}/{state.version}"), Version(state.version + 1)
        self.shard.receive(payload, p, wire_format.encode(learned, self.codec, state.version))
        item = WeightedPayload(payload, IslandId("a"), 1.0)
        order = MergeFragment(Epoch(1), p, version, 1, (item,), CloseReason.EVERYONE_IN, "")
        self._publish(self.shard.merge(order).publication)

    def _publish(self, publication: Publication) -> None:
        before = self._published.get(publication.fragment)
        self._published[publication.fragment] = published(publication, before)

    # ── as the client of its service ──────────────────────────────────────────────────────────────────────────────

    def specification(self, job: str) -> Any:
        return SimpleNamespace(job="followed", specification=SPEC)

    def download_tokenizer(self, job: str, to: Path) -> None:
        raise AssertionError("its tokens are bytes")

    def download_origin(self, job: str, to: Path) -> None:
        raise NotFound(detail="It began without a checkpoint.")

    @contextmanager
    def updates(self, job: str, held: Iterable[int]) -> Iterator[Iterator[bytes]]:
        self.trouble()
        self.asked.append(tuple(held))
        yield self._chunks(self.answer(self.asked[-1]))

    def answer(self, held: tuple[int, ...]) -> bytes:
        from orchestrator.runtime import published as files  # here, because it imports Ray

        if self.ended:
            with (self.folder / "merged.safetensors").open("rb") as file:
                return b"".join(final_updates(file, held))
        if held == tuple(one.version for one in self.all_published()):
            return b""
        files.write_updates(self.folder, "followed", held, self, "updates")
        return (self.folder / "updates").read_bytes()

    def end(self) -> None:
        from orchestrator.runtime import published as files

        files.write_parameters(self.folder, {"job": "followed"}, self)
        self.ended = True

    def _chunks(self, content: bytes) -> Iterator[bytes]:
        for start in range(0, len(content), self.chunk_bytes):
            if start >= self.kill_after:
                raise Killed
            yield content[start : start + self.chunk_bytes]

    # ── what a follower should have ───────────────────────────────────────────────────────────────────────────────

    def versions(self) -> tuple[int, ...]:
        return tuple(one.version for one in self.all_published())

    def require_current(self, folder: Path) -> None:
        """Fail unless the folder has Θ bit by bit, as an export of the job would."""
        from orchestrator.runtime import published as files

        exported = self.folder / f"export-{sum(self.versions())}"
        if not exported.exists():
            exported.mkdir()
            files.write_parameters(self.folder, {"job": "followed"}, self, "whole")
            huggingface.write(self.folder / "whole", exported, SPEC)
        for path in exported.iterdir():
            assert (folder / CURRENT / path.name).read_bytes() == path.read_bytes(), path.name
        held = json.loads((folder / OWN / "manifest.json").read_text())["fragments"]
        assert [row["digest"] for row in held] == [self.shard.state(p).digest for p in self.shard.fragments]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


def followed(job: Job, folder: Path, **options: Any) -> list[Followed]:
    return list(follow(lambda: job, "latest", folder, once=True, every_s=0.0, **options))


def test_each_version_is_theta_bit_by_bit_and_costs_a_quarter_of_bfloat16(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "followed"
    (first,) = followed(job, folder)
    job.require_current(folder)
    assert first.bytes_count > 4 * job.parameter_count
    for merges in ([0, 1, 2], [0], [1, 1, 2], [2, 2, 2, 2]):
        for fragment in merges:
            job.merge(fragment)
        (version,) = followed(job, folder)
        assert version.versions == job.versions()
        job.require_current(folder)
        share = job.parameter_count / FRAGMENTS * len(merges)  # of parameters that moved
        assert version.bytes_count < 0.3 * BFLOAT16_BYTES * share * 1.1
    assert followed(job, folder) == []


def test_only_the_versions_that_stay_are_on_the_disk_and_current_is_replaced_at_once(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "followed"
    for fragment in (0, 1, 2, 0):
        followed(job, folder, keep=2)
        before = (folder / CURRENT).resolve()
        job.merge(fragment)
        followed(job, folder, keep=2)
        assert before.is_dir()
        assert (folder / CURRENT).resolve() != before
    assert len(list((folder / "versions").iterdir())) == 2
    assert not [path for path in folder.rglob("*") if "draft" in path.name]


@pytest.mark.parametrize("seed", range(5))
def test_a_follower_that_is_killed_anywhere_continues_from_what_it_holds(job: Job, tmp_path: Path, seed: int) -> None:
    chance, folder, taken = random.Random(seed), tmp_path / "followed", 0
    for _ in range(8):
        for _ in range(chance.randrange(1, 4)):
            job.merge(chance.randrange(FRAGMENTS))
        job.chunk_bytes, job.kill_after = 4096, chance.randrange(0, 4 * job.parameter_count)
        try:
            taken += len(followed(job, folder))
            job.require_current(folder)
        except Killed:
            held = json.loads(path.read_text()) if (path := folder / OWN / "manifest.json").exists() else None
            job.kill_after = 1 << 40
            followed(job, folder)
            kept = tuple(row["version"] if row else -1 for row in held["fragments"]) if held else ()
            assert job.asked[-1] == kept
            job.require_current(folder)
    assert taken


def test_a_fragment_whose_updates_are_gone_comes_whole_and_the_others_do_not(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "followed"
    followed(job, folder)
    for _ in range(12):
        job.merge(1)
    job.merge(0)
    (version,) = followed(job, folder)
    job.require_current(folder)
    assert version.bytes_count < 4 * job.parameter_count / FRAGMENTS * 1.3


def test_a_damaged_or_unannounced_fragment_is_fetched_again(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "followed"
    followed(job, folder)
    path = folder / OWN / "fragment-0001-00000000"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    job.merge(1)
    assert [one.versions for one in followed(job, folder)] == [(0, 1, 0)]
    job.require_current(folder)
    manifest = folder / OWN / "manifest.json"
    manifest.write_text(manifest.read_text().replace(job.shard.state(FragmentId(0)).digest, "0" * 32))
    job.merge(0)
    followed(job, folder)
    job.require_current(folder)


def test_without_a_codec_that_loses_something_fragments_come_whole(tmp_path: Path) -> None:
    job, folder = Job(tmp_path / "job", "float32"), tmp_path / "followed"
    followed(job, folder)
    job.merge(2)
    followed(job, folder)
    job.require_current(folder)


def test_an_ended_job_ends_its_follower_with_the_final_state(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "followed"
    followed(job, folder)
    job.merge(0)
    job.merge(0)
    job.end()
    (last,) = follow(lambda: job, "latest", folder)
    assert last.ended
    assert last.versions == (2, 0, 0)
    assert last.bytes_count < 4 * job.parameter_count / FRAGMENTS * 1.3
    job.require_current(folder)
    assert list(follow(lambda: job, "latest", folder)) == []


def test_a_service_that_is_away_is_waited_for_and_said_once(job: Job, tmp_path: Path) -> None:
    folder, said = tmp_path / "followed", []
    job.end()
    count = itertools.count()

    def away() -> None:
        if next(count) < 4:
            raise ServiceUnreachable(detail="The service does not answer.", remedy="Start it.")

    job.trouble = away
    (version,) = follow(lambda: job, "latest", folder, every_s=0.0, say=said.append)
    assert version.ended
    assert len(said) == 2
    assert "does not answer" in said[0]
    assert "followed again" in said[1]


def test_a_folder_of_something_else_and_one_in_use_are_refused(job: Job, tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "model.safetensors").touch()
    with pytest.raises(ConfigurationError, match="not the folder of a follower"):
        followed(job, tmp_path / "else")
    running = follow(lambda: job, "latest", tmp_path / "followed")
    next(running)
    with pytest.raises(ConfigurationError, match="Another process follows a job"):
        followed(job, tmp_path / "followed")
    running.close()
    manifest = tmp_path / "followed" / OWN / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"followed"', '"other"'))
    with pytest.raises(ConfigurationError, match="follows job other, not followed"):
        followed(job, tmp_path / "followed")


def test_a_full_disk_is_one_sentence_and_costs_no_version(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "followed"
    followed(job, folder)
    before = (folder / CURRENT).resolve()
    job.merge(0)

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    job.trouble = full
    with pytest.raises(ConfigurationError, match=r"cannot be written \(No space left on device\)"):
        followed(job, folder)
    assert (folder / CURRENT).resolve() == before
    job.trouble = lambda: None
    followed(job, folder)
    job.require_current(folder)


def test_more_fragments_than_a_request_can_name_are_one_sentence(job: Job, tmp_path: Path) -> None:
    (own := tmp_path / "followed" / OWN).mkdir(parents=True)
    (own / "manifest.json").write_text(json.dumps({"job": "followed", "fragments": [None] * 3000}))
    with pytest.raises(ConfigurationError, match="has 3000 fragments, too many to name in a request"):
        followed(job, tmp_path / "followed")


def test_fragments_that_arrived_before_an_interruption_are_kept_and_rests_are_removed(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "followed"
    job.chunk_bytes, job.kill_after = 4096, int(4 * job.parameter_count * 0.8)
    with pytest.raises(Killed):
        followed(job, folder)
    (rest := folder / OWN / "fragment-0002-00000007").touch()
    job.kill_after = 1 << 40
    (first,) = followed(job, folder)
    assert job.asked[-1] == (0, 0)
    assert first.bytes_count < 4 * job.parameter_count / FRAGMENTS * 1.3
    assert not rest.exists()
    job.require_current(folder)


@pytest.mark.parametrize("noted", [True, False])
def test_other_values_of_a_version_are_never_published_nor_updated(job: Job, tmp_path: Path, noted: bool) -> None:
    folder = tmp_path / "followed"
    followed(job, folder)
    path, manifest = folder / OWN / "fragment-0001-00000000", folder / OWN / "manifest.json"
    values = {name: array + 1 for name, array in wire_format.decode(path.read_bytes()).items()}
    path.write_bytes(wire_format.encode(values))
    if noted:  # a version that was replaced before it was announced
        other = manifest.read_text().replace(job.shard.state(FragmentId(1)).digest, tensors.digest(values))
        manifest.write_text(other)
    job.merge(1 if noted else 0)
    followed(job, folder)
    job.require_current(folder)
