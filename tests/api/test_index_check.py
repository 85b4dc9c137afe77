"""An index is looked at when its job is submitted: whether it is one, is of the job's text, and which it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from api.jobs.path_check import problems_outside_roots, with_index_digest
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.system.roots import AllowedRoots
from orchestrator.text import data_index
from orchestrator.text.data_index import DataIndex, IndexedSource

TEXT = b"a text\n"


def index(name: str | None = "web", size: int = len(TEXT), text_field: str = "text", **changes) -> DataIndex:
    numbers = data_index.numbers([3, 9], [1, 2], [(1, 4, 2**63 + 1)])
    files = ((("a.jsonl", size), ("elsewhere.jsonl", 5)), (("held-out.jsonl", 7),))
    source = IndexedSource(name, text_field, *files, "rules", 2, 1, numbers)
    return DataIndex(**{"tokenizer": "bytes", "held_out_ratio": 0.0, "sources": (source,), **changes})


@pytest.fixture
def submit(tmp_path: Path) -> Callable[..., JobSpec]:
    (tmp_path / "a.jsonl").write_bytes(TEXT)

    def submitted(content: bytes | None, roots: AllowedRoots | None = None, **changes) -> JobSpec:
        if content is not None:
            (tmp_path / "index").write_bytes(content)
        source = {
            "name": "web",
            "files": [str(tmp_path / "a.jsonl"), "s3://bucket/elsewhere.jsonl"],
            "held_out": ["/only/on/nodes/held-out.jsonl"],
        }
        data = {"source": "streamed", "sources": [source], "index": str(tmp_path / "index"), **changes}
        spec = parse_job({"islands": [{"node_group": "a"}], "budget": {"steps": 1}, "data": data})
        return with_index_digest(spec, roots or AllowedRoots.only(tmp_path))

    return submitted


@pytest.mark.parametrize("name", ["web", None])
def test_its_digest_becomes_the_job_s(submit: Callable[..., JobSpec], name: str | None) -> None:
    data = submit(index(name).content()).data
    assert data.index_digest == index(name).content()[-16:].hex()
    assert submit(None, index_digest=data.index_digest).data == data


@pytest.mark.parametrize(
    ("changed", "data", "problem"),
    [
        (index(size=8), {}, r"data\.index: is .*a\.jsonl' had 8 bytes, and now has 7\. Make a new index"),
        (index("code"), {}, r"has the sources 'code', but not web\. Make"),
        (index(text_field="body"), {}, r"the text of web is in the field 'body'; the job's is in 'text'\. Make"),
        (index(tokenizer="0" * 32), {}, r"counts tokens of the tokenizer with the digest 0{32}; the job has bytes"),
        (
            index(held_out_ratio=0.02),
            {},
            r"leaves out 0\.02 of the documents .*; the job holds out only files that its sources",
        ),
        (index(), {"index_digest": "0" * 32}, r"data\.index_digest: is 0{32}, but the file has"),
        (index(), {"sources": [{"name": "web", "files": ["/a.jsonl"]}]}, r"leaves out only files .* holds out 0\.02"),
        (
            index(),
            {"sources": [{"name": "web", "files": ["/b.jsonl", "/c"], "held_out": ["/d"]}]},
            r"other files of web: number 0 is 'a\.jsonl' in the index, '/b\.jsonl' in the job",
        ),
        (
            index(),
            {"sources": [{"name": "web", "files": ["/a.jsonl", "/elsewhere.jsonl"], "held_out": ["/d", "/e"]}]},
            r"other held_out of web: 1 in the index, 2 in the job",
        ),
    ],
)
def test_one_that_does_not_fit_is_refused_with_field_value_and_remedy(submit, changed, data, problem) -> None:
    with pytest.raises(InvalidJobSpec, match=problem):
        submit(changed.content(), **data)


def test_one_that_is_not_there_or_outside_is_refused(submit, tmp_path: Path) -> None:
    with pytest.raises(InvalidJobSpec, match=r"data\.index: .* cannot be read here .* `atoll data index`"):
        submit(None)
    roots = AllowedRoots.only(tmp_path / "data")
    spec = submit(index().content(), roots)
    assert spec.data.index_digest is None
    assert "data.index" in {problem.path for problem in problems_outside_roots(spec, roots)}


def test_every_byte_of_it_counts(submit: Callable[..., JobSpec]) -> None:
    content = index().content()
    for at in range(len(content)):
        damaged = content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]
        with pytest.raises(ConfigurationError, match=r"is damaged|is not a data index"):
            data_index.parse(damaged, "index")
        with pytest.raises(ConfigurationError, match=r"is damaged|is not a data index"):
            data_index.parse(content[:at], "index")
    with pytest.raises(InvalidJobSpec, match=r"data\.index: .* is damaged: its digest does not match"):
        submit(content[:-1])


def test_one_with_a_right_digest_and_nonsense_in_it_is_damaged() -> None:
    from hashlib import blake2b

    for header in (
        b"[]",
        b"{}",
        b'{"tokenizer":1}',
        index().content().split(b"\n")[1].replace(b'"pieces":2', b'"pieces":-2'),
    ):
        content = data_index.MAGIC + header + b"\n" + b"\0" * 32
        with pytest.raises(ConfigurationError, match="is damaged: it cannot be read"):
            data_index.parse(content + blake2b(content, digest_size=16).digest(), "index")


def test_only_streamed_text_has_an_index() -> None:
    document = {"islands": [{"node_group": "a"}], "budget": {"steps": 1}, "data": {"index": "/data/index"}}
    with pytest.raises(
        InvalidJobSpec, match=r"data\.index: is /data/index, but data\.source is builtin: only streamed"
    ):
        parse_job(document)
