"""Whoever writes a snapshot's bytes gets nothing run and nothing made by it, but a sentence in a log (finding 17).

The digest has no key and the build can be worked out by anybody, so every forgery here carries the right ones.
"""

from __future__ import annotations

import json
import pickle
import pickletools
import random
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.errors import DataError
from orchestrator.host.job_files import open_files
from orchestrator.simulation.plan import WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.system.run_folder import SNAPSHOT
from orchestrator.tape import storage
from orchestrator.tape.driver import Pending
from orchestrator.tape.schema import Mark
from orchestrator.tape.snapshot import BYTES_MAX, Snapshot, _digest, decode, encode
from orchestrator.tape.storage import TapeWriter, build, read_snapshot
from tests.simulation.random_faults import random_faults
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent
POLICY = sample_policy(3, quorum=2, steps=60)
MUTATIONS = 400


def stack_global(module: str, name: str, argument: str) -> bytes:
    """Protocol 4: the callable of that dotted name, called with one text."""
    short = lambda text: b"\x8c" + bytes([len(text)]) + text.encode()  # noqa: E731
    return b"\x80\x04" + short(module) + short(name) + b"\x93" + short(argument) + b"\x85R."


def pickles(witness: Path) -> dict[str, bytes]:
    """Bytes that would harm a process that unpickles them: most would make the file ``witness``."""
    touch = f"touch {witness}"
    return {
        "a module of ours, and dots to os.system": stack_global("orchestrator.tape.storage", "gzip.os.system", touch),
        "a module of ours, and dots to eval": stack_global(
            "orchestrator.tape.snapshot", "json.codecs.builtins.eval", f"__import__('os').system('{touch}')"
        ),
        "GLOBAL": b"cos\nsystem\n(V" + touch.encode() + b"\ntR.",
        "INST": b"(V" + touch.encode() + b"\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nV" + touch.encode() + b"\no.",
        "BUILD": b"corchestrator.core.synchroniser\nSynchroniser\n)\x81}V__class__\ncos\nsystem\nsb.",
        "getattr by REDUCE": b"cbuiltins\ngetattr\n(corchestrator.tape\nstorage\nVgzip\ntR(V"
        + touch.encode()
        + b"\ntR.",
        "EXT1 of copyreg": b"\x80\x02\x82\x01.",
        "a persistent id": b"Pos.system\n.",
        "a buffer that is not there": b"\x80\x05\x97.",
        "a bomb of the memo": b"\x80\x04(]\x94" + b"(h\x00h\x00l\x94" * 40 + b".",
        "a frame of an exabyte": b"\x80\x04\x95" + b"\xff" * 8 + b".",
        "nested tuples": b"\x80\x04)" + b"\x85" * 200_000 + b".",
    }


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    plan = WorldPlan((0.05, 0.05, 0.07), faults=random_faults(3, POLICY, 2.0, 4))
    world = World(POLICY, plan, seed=3).run(until=3.0)
    pending = Pending()
    for record in world.sink.records:
        pending.apply(record.event, record.effects)
    return Snapshot(Mark(3, 10, "0" * 32), 1.5, world.core, (pending, world.goodput, world.statistics))


def forged(body: bytes, **changes: Any) -> bytes:
    """With a header that fits ``body``."""
    header = {"schema": "atoll-snapshot/2", "build": build(), "at": 1.5, "count": 3, "size": 10, "tape": "0" * 32}
    header |= changes
    return json.dumps({**header, "digest": _digest(header, body)}).encode() + b"\n" + body


def body_of(snapshot: Snapshot) -> Any:
    return json.loads(encode(snapshot, build()).partition(b"\n")[2])


def written(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


WITNESSED = """
import sys
from pathlib import Path
from orchestrator.errors import DataError
from orchestrator.tape import storage

folder, opened = Path(sys.argv[1]), None
try:  # what a reader learns once, of its own declarations
    storage.read_snapshot(folder / "whole")
except DataError:
    pass
(folder / "whole").unlink()
WATCHED = ("os.", "subprocess.", "exec", "compile", "import", "open", "pickle.", "marshal.", "ctypes.", "socket.", "code.")

def watch(event, arguments):
    if event.startswith(WATCHED) and not (event == "open" and str(arguments[0]) == str(opened)):
        print("RAN", event, arguments, opened, flush=True)

paths = sorted(folder.iterdir())
sys.addaudithook(watch)
for opened in paths:
    try:
        storage.read_snapshot(opened)
        print("READ", opened, flush=True)
    except DataError as error:
        print("REFUSED", opened.name, flush=True)
"""


@pytest.mark.parametrize("schema", ["atoll-snapshot/1", "atoll-snapshot/2"])
def test_no_pickle_is_anything_but_refused_and_nothing_runs(tmp_path: Path, schema: str) -> None:
    folder, witness = tmp_path / "snapshots", tmp_path / "w"
    folder.mkdir()
    hostile = pickles(witness)
    for number, pickled in enumerate(hostile.values()):
        (folder / f"{number:02}").write_bytes(forged(pickled, schema=schema))
    (folder / "whole").write_bytes(forged(b"null"))
    script = [sys.executable, "-c", WITNESSED, str(folder)]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("REFUSED")] == []
    assert len(lines) == len(hostile)
    assert not witness.exists()


def test_the_pickles_here_are_pickles() -> None:
    """What a test of refusals refuses for another reason shows nothing."""
    hostile = pickles(Path("w"))
    for name in ("a module of ours, and dots to os.system", "GLOBAL", "INST", "getattr by REDUCE", "EXT1 of copyreg"):
        assert [opcode.name for opcode, *_ in pickletools.genops(hostile[name])][-1] == "STOP"
    harmless = stack_global("orchestrator.tape.storage", "gzip.os.path.basename", "/a/b")
    assert pickle.loads(harmless) == "b"


def test_classes_are_made_where_they_are_declared_and_nowhere_else(snapshot: Snapshot) -> None:
    core, folds = body_of(snapshot)
    (pending, goodput, statistics) = folds
    for odd in (
        [core, [pending, [goodput[0], statistics[1]], statistics]],  # one of ours in another's place
        [core, [pending, ["TapeWriter", ["/etc/passwd"]], statistics]],
        [core, [pending, ["subprocess.Popen", [["/bin/sh"]]], statistics]],
        [core, [pending, ["__class__", []], statistics]],
        [core, [pending, [["Goodput"], goodput[1]], statistics]],
        [{"py/object": "os.system", "py/reduce": ["touch"]}, folds],
        [{"__reduce__": ["os.system", ["touch"]]}, folds],
        [core, {"0": pending}],
        [folds, core],
        [core],
        [core, folds, core],
        {},
        None,
        7,
    ):
        with pytest.raises(DataError):
            decode(forged(written(odd)), build())


def test_a_value_anywhere_is_of_its_declared_kind_or_all_is_refused(snapshot: Snapshot) -> None:
    chance, body = random.Random(12), body_of(snapshot)
    places = list(places_in(body))
    alternatives = [
        True,
        None,
        10**30,
        -(10**400),
        1.5,
        "\ud800",
        "x",
        [],
        {},
        [[]],
        float("nan"),
        {"a": [1]},
        "9" * 99,
    ]
    refused = 0
    for _ in range(MUTATIONS):
        mutated = deepcopy(body)
        *way, last = chance.choice(places)
        here = mutated
        for step in way:
            here = here[step]
        here[last] = chance.choice(alternatives)
        raw = written(mutated)
        try:
            back = decode(forged(raw), build())
        except DataError:
            refused += 1
        else:  # a value of the right kind is one
            again = json.loads(encode(back, build()).partition(b"\n")[2])
            assert repr(again) == repr(mutated)
    assert refused > MUTATIONS * 0.6


def places_in(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to every value within, by keys and numbers."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*way, key)
        yield from places_in(inner, (*way, key))


@pytest.mark.parametrize(
    "changes",
    [
        {"count": True},
        {"count": -1},
        {"size": 10**400},
        {"size": "10"},
        {"size": float("nan")},
        {"at": None},
        {"tape": 7},
        {"tape": "\ud800"},
        {"schema": ["atoll-snapshot/2"]},
        {"schema": "atoll-snapshot/1"},
        {"build": {}},
    ],
)
def test_a_header_is_of_its_declared_kinds(snapshot: Snapshot, changes: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        decode(forged(written(body_of(snapshot)), **changes), build())


HUGE = {
    "deeply nested lists": b"[" * 1_000_000,
    "deeply nested objects": b'{"a":' * 1_000_000,
    "an integer of a million digits": b"[" + b"9" * 1_000_000 + b"]",
    "a million lists": b"[" + b"[]," * 1_000_000 + b"0]",
    "a million objects": b"[" + b'{"a":0},' * 1_000_000 + b"0]",
    "no UTF-8": b'["\xff\xfe"]',
    "nothing": b"",
}
MEASURED = """
import resource, sys
from pathlib import Path
from orchestrator.errors import DataError
from orchestrator.tape import storage
storage.build()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
try:
    storage.read_snapshot(Path(sys.argv[1]))
except DataError as error:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    print(len(str(error)), peak() - before, spent.ru_utime + spent.ru_stime)
"""


@pytest.mark.parametrize("name", HUGE)
def test_what_is_deep_or_long_is_refused_with_a_short_reason(name: str) -> None:
    with pytest.raises(DataError) as refused:
        decode(forged(HUGE[name]), build())
    assert len(str(refused.value)) < 400


def test_a_file_is_read_so_far_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk, and none in memory
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    length, kilobytes, cpu_s = map(float, done.stdout.split())
    assert length < 400
    assert kilobytes * 1024 < 4 * BYTES_MAX
    assert cpu_s < 20


def test_a_mark_beyond_the_end_of_the_tape_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = tmp_path / "tape.jsonl", []
    from orchestrator.tape.schema import Header

    TapeWriter(path, Header("a job", POLICY)).let_go()
    load = storage._load
    monkeypatch.setattr(storage, "_load", lambda *arguments: reads.append(1) or load(*arguments))
    writer, tape = TapeWriter.reopen(path, mark=Mark(5, (1 << 63) - 1, "0" * 32))
    writer.let_go()
    assert tape.before == 0
    assert len(reads) < 6


@pytest.mark.parametrize("kind", ["another policy", "other folds", "folds in another order", "no folds"])
def test_a_job_takes_up_only_a_snapshot_of_itself(tmp_path: Path, snapshot: Snapshot, kind: str) -> None:
    """The whole way that a synchroniser goes which comes back."""
    from orchestrator.specification.config import JobSpec
    from orchestrator.tape.schema import Header

    spec = JobSpec.model_validate(
        {
            "name": "a",
            "islands": [{"node_group": "here"}],
            "budget": {"steps": 10},
            "synchroniser": {"durability": {"kind": "sync"}},
            "trainer": "learners.synthetic:create",
        }
    )
    policy = sample_policy(2, quorum=2, steps=60) if kind == "another policy" else POLICY
    folds = {
        "other folds": (Pending(), Statistics(POLICY)),
        "folds in another order": (Pending(), Statistics(POLICY), Goodput(POLICY)),
        "no folds": (),
    }.get(kind, snapshot.folds)
    with TapeWriter(tmp_path / "tape.jsonl", Header("job", policy)) as tape:
        tape.sync()
        mark = tape.mark
        tape.let_go()
    (tmp_path / SNAPSHOT).write_bytes(encode(Snapshot(mark, 0.0, snapshot.core, folds), build()))
    assert read_snapshot(tmp_path / SNAPSHOT) is not None
    wanted = Goodput(policy), Statistics(policy)
    with pytest.raises(DataError, match="the snapshot has merges"):  # and on the tape there are none
        open_files(tmp_path, "job", spec, policy, 0.0, wanted)
    fresh = Snapshot(mark, 0.0, Synchroniser(snapshot.core.state.policy), folds)
    (tmp_path / SNAPSHOT).write_bytes(encode(fresh, build()))
    files = open_files(tmp_path, "job", spec, policy, 0.0, wanted)
    files.tape.let_go()
    assert files.past is not None
    assert files.past.before == 0
    assert [type(fold) for fold in files.folds] == [Goodput, Statistics]
    assert files.core.state.policy == policy
