"""Cursors count batches; a resumption deals sequences, also of checkpoints that were taken when all batches were alike."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from orchestrator.checkpoints.manifest import decode, encode, from_document
from orchestrator.checkpoints.resumption import Resumption, differences
from orchestrator.errors import DataError
from tests.checkpoints.making import make


@pytest.fixture
def manifest(tmp_path):
    return decode(make(tmp_path, 1).read("manifest.json", 1 << 20), "it")


def document(manifest, **changes):
    return {**asdict(manifest), **changes}


def test_the_next_leg_is_in_the_sequences_that_divide_all_batches(manifest) -> None:
    mixed = from_document(document(manifest, cursors=[3, 5], batch_sizes=[8, 12]), "it")
    assert Resumption("", mixed, ()).resumptions == ((4, (6, 15)),)


def test_a_manifest_of_an_earlier_build_counts_batches_of_one_size(manifest) -> None:
    old = document(manifest, cursors=[3, 5], legs=[[7, 1, 2]])
    del old["batch_sizes"], old["granules"]
    assert Resumption("", from_document(old, "it"), ()).resumptions == ((2, (7, 1, 2)), (2, (3, 5)))


def test_what_is_written_is_read(manifest) -> None:
    resumed = from_document(document(manifest, legs=[[7, 1, 2]], granules=[4]), "it")
    assert decode(encode(resumed), "it") == resumed


@pytest.mark.parametrize(
    "wrong", [{"batch_sizes": [0, 2]}, {"batch_sizes": [2]}, {"granules": [1]}, {"batch_sizes": "ab"}, {"granules": 1}]
)
def test_what_cannot_be_is_refused(manifest, wrong) -> None:
    with pytest.raises(DataError, match=r"batch sizes|batch_sizes|granules"):
        from_document(document(manifest, **wrong), "it")


def test_a_checkpoint_of_an_earlier_build_is_of_the_same_data_and_another_tokenizer_is_not() -> None:
    old = {"data": {"source": "builtin", "sequence_length": 8}}
    now = {"source": "builtin", "sequence_length": 8, "sources": [], "tokenizer": "bytes", "tokenizer_digest": None}
    now |= {"separator": None, "unreadable_max": 7}
    assert differences(old, {"data": now}) == []
    assert "data.tokenizer_digest was" in differences(old, {"data": {**now, "tokenizer_digest": "0" * 32}})[0]
    assert differences({"training": {"batch_size": 2}}, {"training": {"batch_size": 3}}) == []


def test_routers_are_apart_in_both_jobs_or_in_neither_and_how_often_they_merge_may_change() -> None:
    without, four, six = ({"synchroniser": {"router_interval_steps": n}} for n in (None, 4, 6))
    assert differences(four, six) == differences({"synchroniser": {}}, without) == []
    (refusal,) = differences(without, four)
    assert refusal.startswith("synchroniser.router_interval_steps was not set but is set")
    assert differences(six, {}) != []


def test_tokens_around_documents_are_the_same_where_one_of_the_two_leaves_them_to_the_tokenizer() -> None:
    def data(tokenizer: str, separator: int | None = None, **begin_token: object) -> dict:
        return {"data": {"tokenizer": tokenizer, "separator": separator, **begin_token}}

    file, filled_in = "/data/tokenizer.json", data("/data/tokenizer.json", 1, begin_token=2)
    assert differences(data(file, begin_token="tokenizer"), filled_in) == []
    assert differences(filled_in, data(file, begin_token="tokenizer")) == []
    assert differences(data(file), data(file, 1, begin_token="none")) == [], "an earlier build began with nothing"
    assert differences(data(file), filled_in) == ["data.begin_token was 'none' but is 2"]
    assert differences(filled_in, data(file, 0, begin_token=2)) == ["data.separator was 1 but is 0"]
    assert differences(data("bytes", begin_token="tokenizer"), data("bytes", begin_token="none")) == []
    assert differences(data("bytes"), data("bytes", begin_token="tokenizer")) == []
    assert differences(data("bytes"), data("bytes", 0)) == ["data.separator was not set but is 0"]
    assert differences(data("bytes", begin_token="tokenizer"), data("bytes", begin_token=0)) != []
