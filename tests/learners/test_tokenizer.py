"""Text becomes the tokens of the job's tokenizer, the same on every node; a file that is no tokenizer is refused."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from learners import tokenizer, tokenizer_training
from learners.corpus import joined, split, text_bytes
from learners.text import Text
from orchestrator.errors import ConfigurationError, InvalidJobSpec, OutsideRoots
from orchestrator.models.huggingface.export import end_of_text_of
from orchestrator.models.huggingface.export import files_of as exported_files
from orchestrator.specification.config import parse_job
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import AllowedRoots
from orchestrator.text import tokenizer_file

TEXTS = [f"the {word} of number {n} is a {word}ing thing\n" for n, word in enumerate(["walk", "sing", "naïve"] * 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=45, minloglevel=2
    )
    (folder / "pieces.model").write_bytes(model.getvalue())
    return folder


def section(path, **changes):
    return DataSection.model_validate({"tokenizer": str(path), "begin_token": "none", **changes})


def load(path, **changes):
    return tokenizer.load(section(path, **changes), AllowedRoots.only(path.parent))


def test_bytes_are_exported_as_a_tokenizer_that_makes_each_byte_its_token() -> None:
    (content,) = [each for name, each in exported_files(None, None).items() if name == "tokenizer.json"]
    own = Tokenizer.from_str(content.decode())
    text = "".join(map(chr, range(0x250))) + " 日本  \n<s>"
    assert own.encode(text).ids == list(text.encode())
    assert own.decode(list(text.encode())) == text


@pytest.mark.parametrize("name", ["tokenizer.json", "pieces.model"])
def test_a_separator_that_is_text_is_no_end_of_it(folder, name) -> None:
    file = tokenizer_file.read(AllowedRoots.only(folder), str(folder / name))
    end = end_of_text_of(file, None)
    assert end == file.end_of_text is not None
    assert end_of_text_of(file, 7) is None
    config = json.loads(exported_files(file, end)["tokenizer_config.json"])
    assert file.tokens[config["eos_token"]] == end
    assert "eos_token" not in json.loads(exported_files(file, None)["tokenizer_config.json"])


@pytest.mark.parametrize("name", ["tokenizer.json", "pieces.model"])
def test_a_file_is_known_without_its_library(folder, name) -> None:
    known = tokenizer_file.read(AllowedRoots.only(folder), str(folder / name))
    if name.endswith(".json"):
        own = Tokenizer.from_file(str(folder / name))
        assert known.vocabulary_size == own.get_vocab_size()
        assert known.end_of_text == own.token_to_id("<|endoftext|>")
    else:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
        assert known.vocabulary_size == pieces.vocab_size()
        assert known.end_of_text == pieces.eos_id()


def test_documents_become_tokens_with_the_separator_between_them(folder) -> None:
    ours, theirs = load(folder / "tokenizer.json"), Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = joined(ours, [text.encode() for text in TEXTS[:3]])
    ends = np.flatnonzero(tokens == ours.separator)
    assert tokens.dtype == np.uint16
    assert theirs.decode(tokens[: ends[0]].tolist()) == TEXTS[0]
    assert len(ends) == 2


@pytest.mark.parametrize("name", ["tokenizer.json", "pieces.model", "bytes"])
def test_tokens_are_counted_as_they_are_encoded(folder, name) -> None:
    ours = tokenizer.Bytes() if name == "bytes" else load(folder / name)
    texts = [text.encode() for text in TEXTS] + [b"", b"\xff no text \xfe", b"<|endoftext|></s>"]
    assert ours.counts(texts) == [len(tokens) for tokens in ours.encode(texts)]


def test_a_control_token_in_a_document_is_only_text(folder) -> None:
    ours = load(folder / "tokenizer.json")
    (tokens,) = ours.encode([b"before<|endoftext|>after"])
    assert ours.separator not in tokens
    assert len(tokens) > 10


def test_bytes_are_as_they_have_always_been() -> None:
    ours = tokenizer.Bytes()
    assert joined(ours, [b"\xff\x00a", b"b"]).tolist() == [255, 0, 97, 10, 98]
    assert text_bytes([b"\xff\x00a", b"b"]) == 5


def test_sentencepiece_reads_what_is_no_text(folder) -> None:
    ours = load(folder / "pieces.model")
    assert all(tokens.max() < ours.vocabulary_size for tokens in ours.encode([b"the \xff\xfe walk", b"sing"]))


def test_a_corpus_in_memory_is_in_tokens_and_knows_their_bytes(folder) -> None:
    text = split([t.encode() for t in TEXTS], 0.1, 32, load(folder / "tokenizer.json"))
    assert text.training.dtype == np.uint16
    assert text.vocabulary_size == 300
    assert 1.5 < text.held_out_bytes_per_token < 8


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b'{"model": {"vocab": {"a": -1}}}',
        b'{"model": {"vocab": {"a": true}}}',
        b'{"model": {"vocab": {}}}',
        b'{"model": {"vocab": [["a", 0]]}, "added_tokens": [{"content": "b", "id": "9"}]}',
        b'{"model": {"vocab": {"a": 99999999999}}}',
        b"[" * 100_000,
        b"\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\n\x05\n",
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.model"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, name, content) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"is neither a tokenizer\.json nor"):
        tokenizer_file.read(AllowedRoots.only(tmp_path), str(tmp_path / name))


def test_a_file_that_only_looks_like_one_is_refused_when_its_library_reads_it(tmp_path) -> None:
    special = [{"content": "</s>", "id": 0, "special": True}]
    (tmp_path / "a.json").write_text(json.dumps({"model": {"vocab": {"</s>": 0}}, "added_tokens": special}))
    (tmp_path / "a.model").write_bytes(b"\n\x08\n\x04</s>\x18\x03")
    for name in ("a.json", "a.model"):
        with pytest.raises(ConfigurationError, match="cannot read the file"):
            load(tmp_path / name).encode([b"text"])


def test_a_file_that_is_too_large_or_outside_or_absent_is_refused(tmp_path, folder, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer_file, "FILE_BYTES_MAX", 100)
    with pytest.raises(ConfigurationError, match="has more than"):
        load(folder / "tokenizer.json")
    with pytest.raises(ConfigurationError, match="cannot be read here"):
        load(tmp_path / "gone.json")
    with pytest.raises(OutsideRoots):
        tokenizer.load(section(folder / "tokenizer.json"), AllowedRoots.only(tmp_path))


def test_another_file_than_the_job_began_with_is_refused(folder) -> None:
    with pytest.raises(ConfigurationError, match=r"has the digest .* here, but 0{32} where the job was submitted"):
        load(folder / "tokenizer.json", tokenizer_digest="0" * 32)


def test_a_separator_that_is_no_token_is_refused(folder) -> None:
    with pytest.raises(ConfigurationError, match=r"data.separator: .* has no token 300"):
        load(folder / "tokenizer.json", separator=300)


def test_tokens_that_the_model_has_not_are_refused_when_the_trainer_is_made(folder, make_job) -> None:
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    files = {"source": "files", "files": [str(folder / "text.jsonl")]}
    spec = make_job(data={**files, "tokenizer": str(folder / "tokenizer.json"), "sequence_length": 32})
    spec["roots"] = AllowedRoots.only(folder)
    with pytest.raises(
        ConfigurationError, match=r"data.tokenizer: .* with 300 tokens, but the model has only 256. Use the tokenizer"
    ):
        Text(spec, 256)
    assert Text(spec, 300).held_out_batches(8)[0].max() >= 256


def test_a_separator_that_no_byte_is_is_a_problem_of_the_specification() -> None:
    document = {"islands": [{"node_group": "here"}], "budget": {"steps": 1}}
    with pytest.raises(InvalidJobSpec, match=r"data.separator: is 256, but bytes have no token above 255"):
        parse_job({**document, "data": {"separator": 256}})


def test_the_same_files_make_the_same_tokenizer_of_the_size_that_was_wanted(tmp_path, capsys) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "b.txt").write_text("".join(TEXTS))
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.txt")]
    for name in ("one", "two"):
        options = ["--vocabulary-size", "290", "--output", str(tmp_path / name), "--json"]
        assert tokenizer_training.main([*files, *options]) == 0
    one, two = ((tmp_path / name).read_bytes() for name in ("one", "two"))
    assert one == two
    facts = json.loads(capsys.readouterr().out.splitlines()[0])
    assert facts["vocabulary_size"] == 290
    known = tokenizer_file.read(AllowedRoots.only(tmp_path), str(tmp_path / "one"))
    assert (known.digest, known.vocabulary_size, known.end_of_text) == (facts["digest"], 290, 0)
    ours = tokenizer.FromFile(known, 0)
    (tokens,) = ours.encode(["⚓ any text ☃".encode()])
    assert Tokenizer.from_str(one.decode()).decode(tokens.tolist()) == "⚓ any text ☃"


@pytest.mark.parametrize(("file", "size"), [("a.txt", 256), ("gone.txt", 300), ("a.jsonl", 300), ("empty.txt", 300)])
def test_what_cannot_be_trained_is_a_line_and_no_traceback(tmp_path, capsys, file, size) -> None:
    for name, content in (("a.txt", "text"), ("a.jsonl", "{"), ("empty.txt", "")):
        (tmp_path / name).write_text(content)
    options = ["--vocabulary-size", str(size), "--output", str(tmp_path / "out.json")]
    assert tokenizer_training.main([str(tmp_path / file), *options]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("atoll: ")
    assert "unreadable_max" not in said, "there is no such option"
    assert not (tmp_path / "out.json").exists()
