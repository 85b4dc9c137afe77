"""The tokens around a document are those of the model's family, and what a document says is never one of them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from learners import data_indexing, tokenizer
from learners.corpus import joined
from learners.streaming.documents import Continuation
from learners.text import Text
from learners.tokenizer import SPACE
from orchestrator.core.vocabulary import NO_FLAWS
from orchestrator.errors import ConfigurationError
from orchestrator.models.huggingface.export import end_of_text_of
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import EVERYTHING, AllowedRoots
from orchestrator.text import data_index, tokenizer_file
from tests.learners.tokenizers_of import FAMILIES, HTML, config, pieces_of_gemma, pieces_of_llama_2

NO_FAMILY = "control token that is known to end a text"


def load(path: Path, **changes: Any) -> tokenizer.Tokenizer:
    section = DataSection.model_validate({"tokenizer": str(path), **changes})
    return tokenizer.load(section, AllowedRoots.only(path.parent))


def read(path: Path) -> tokenizer_file.TokenizerFile:
    return tokenizer_file.read(AllowedRoots.only(path.parent), str(path))


def require_text_only(ours: tokenizer.Tokenizer, file: tokenizer_file.TokenizerFile) -> None:
    """Whatever control tokens documents spell, alone or among text, none becomes one, and all are counted as encoded."""
    spelled = [text for text, token in file.tokens.items() if token in file.never_text]
    texts = [*spelled, *(f"a {text}{text} is a thing{text}" for text in spelled), "".join(spelled), "\n".join(spelled)]
    documents = [text.encode() for text in texts]
    encoded = ours.encode(documents)
    assert not [text for text, tokens in zip(texts, encoded, strict=True) if set(tokens.tolist()) & file.never_text]
    assert ours.counts(documents) == list(map(len, encoded))
    tokens = joined(ours, documents)
    assert np.count_nonzero(tokens == ours.separator) == len(documents) - 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_document_has_around_it_what_its_family_has(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    path = family.write(tmp_path)
    ours, file, own = load(path), read(path), Tokenizer.from_file(str(path))
    begin = [] if family.begin is None else [own.token_to_id(family.begin)]
    assert (ours.separator, ours.beginning.tolist()) == (own.token_to_id(family.end), begin)
    assert end_of_text_of(file, ours.separator) == ours.separator
    require_text_only(ours, file)
    text = "<p><s>old price</s> new</p>"
    (tokens,) = ours.encode([text.encode()])
    assert own.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert [own.id_to_token(token) for token in tokens if own.id_to_token(token) in family.ordinary] == (
        ["<p>", "<s>", "</s>", "</p>"] if family.ordinary == HTML else ["</s>"] if family.ordinary else []
    )
    assert joined(ours, [text.encode()] * 2).tolist() == [*begin, *tokens, ours.separator, *begin, *tokens]


SENTENCEPIECE = {
    "gemma": (pieces_of_gemma(), "<eos>", None),
    "gemma, by its configuration": (pieces_of_gemma("unigram"), "<eos>", "<bos>"),
    "llama 2": (pieces_of_llama_2(), "</s>", None),
    "llama 2, by its configuration": (pieces_of_llama_2("unigram"), "</s>", "<s>"),
    "mistral 3": (pieces_of_llama_2(control_symbols=("[INST]", "[/INST]")), "</s>", None),
}


@pytest.mark.parametrize("file_name", ["tokenizer.model", "tokenizer.model.v3"])
@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_s_own_end_stands_behind_a_document(name: str, file_name: str, tmp_path: Path) -> None:
    content, end, begin = SENTENCEPIECE[name]
    (tmp_path / file_name).write_bytes(content)
    if begin is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config(end, begin, add_bos_token=True)))
    ours, file = load(tmp_path / file_name), read(tmp_path / file_name)
    assert ours.separator == file.tokens[end]
    assert ours.beginning.tolist() == ([] if begin is None else [file.tokens[begin]])
    require_text_only(ours, file)
    (tokens,) = ours.encode([b"<p><s>old price</s> new</p>"])
    html = [file.text_of(token) for token in tokens if file.text_of(token) in HTML]
    assert html == (["<p>", "<s>", "</s>", "</p>"] if end == "<eos>" else [])


def added(*texts: str) -> list[AddedToken]:
    return [AddedToken(text, normalized=False) for text in texts]


def of_unigram() -> Tokenizer:
    letters = [(letter, -3.0) for letter in "▁abcdghinst</>"]
    made = Tokenizer(models.Unigram([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *letters], unk_id=2))
    made.normalizer = normalizers.NFKC()
    made.add_special_tokens(added("<pad>", "</s>", "<unk>"))
    return made


def of_words() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"[SEP]": 0, "a": 1, "[UNK]": 2, "[CLS]": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(added("[SEP]", "[CLS]", "[UNK]"))
    return made


@pytest.mark.parametrize("make", [of_unigram, of_words])
def test_a_model_that_has_control_tokens_among_its_words_does_not_find_them_in_a_text(make, tmp_path: Path) -> None:
    make().save(str(tmp_path / "tokenizer.json"))
    ours, file = load(tmp_path / "tokenizer.json"), read(tmp_path / "tokenizer.json")
    require_text_only(ours, file)
    wide, unknown = ours.encode(["ab＜/s＞c".encode(), "☃".encode()])
    assert not file.never_text & set(wide.tolist()), "its letters are normalised to those of a control token"
    assert unknown.tolist() == [file.unknown]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tekken.json", {"config": {"pattern": "x"}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}, "Tekken"),
        ("tokenizer_config.json", {"tokenizer_class": "X", "eos_token": "</s>"}, "it is a tokenizer_config.json"),
        ("config.json", {"model_type": "llama"}, "it is a model's config.json"),
        ("vocab.json", {"a": 0, "b": 1}, "it is a vocab.json"),
        ("tokenizer.model", b"".join(base64.b64encode(b"%c" % n) + b" %d\n" % n for n in range(9)), "tiktoken"),
    ],
)
def test_what_others_call_a_tokenizer_is_refused_by_its_name(tmp_path: Path, name, content, said) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ConfigurationError, match=rf"data\.tokenizer: .*{said}.*name the tokenizer\.json"):
        read(tmp_path / name)


def test_a_folder_is_refused_with_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "Model").mkdir()
    with pytest.raises(ConfigurationError, match=r"not a regular file\. Name the tokenizer\.json"):
        read(tmp_path / "Model")


def test_an_end_that_is_ordinary_text_is_not_taken_for_one(tmp_path: Path) -> None:
    path = FAMILIES["gemma"].write(tmp_path)
    document = json.loads(path.read_text())
    for token in document["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config("<eos>", "<bos>")))
    with pytest.raises(ConfigurationError, match=rf"no {NO_FAMILY}; .*'</s>', '<eos>' is an ordinary.*Set it"):
        load(path)
    assert load(path, separator=1).separator == 1


def test_a_damaged_file_beside_is_named(tmp_path: Path) -> None:
    path = FAMILIES["qwen 2"].write(tmp_path)
    (tmp_path / "config.json").write_text("[")
    assert load(path).separator == 0, "it is no model's"
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigurationError, match=r"generation_config\.json beside .* is not a JSON object"):
        load(path)


def test_a_token_that_is_given_stands_before_each_document_or_none(tmp_path: Path) -> None:
    path = FAMILIES["llama 3"].write(tmp_path)
    assert load(path, begin_token=3).beginning.tolist() == [3]
    assert load(path, begin_token="none").beginning.tolist() == []
    with pytest.raises(ConfigurationError, match=r"data\.begin_token: is 999, but .* has no token 999"):
        load(path, begin_token=999)
    begun = joined(tokenizer.Bytes(10, 2), [b"ab", b"c"])
    assert begun.tolist() == [2, 97, 98, 10, 2, 99]


@pytest.mark.parametrize("source", ["files", "streamed", "with an index"])
def test_what_is_drawn_has_the_token_before_each_document_and_an_index_promises_no_other_count(
    source: str, tmp_path: Path, make_job
) -> None:
    path = FAMILIES["llama 3"].write(tmp_path)
    texts = [f"document {n} is a {'long ' * (n % 7)}thing" for n in range(600)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data: dict[str, Any] = {"source": "files", "files": [str(tmp_path / "a.jsonl")]}
    if source != "files":
        data = {"source": "streamed", "sources": [{"name": "a", "files": [str(tmp_path / "a.jsonl")]}]}
    data |= {"tokenizer": str(path), "sequence_length": 64}
    if source == "with an index":
        data_indexing.make(make_job(data=data)["data"], tmp_path / "index", 1, progress=False)
        data["index"] = str(tmp_path / "index")
    text = Text({**make_job(data=data, training={"batch_size": 4}), "roots": EVERYTHING})
    ours, draw = load(path), text.draw(0, 1)
    for tokens in [*np.concatenate([draw(number) for number in range(20)]), *text.held_out_batches(1)[0]]:
        ends = np.flatnonzero(tokens[:-1] == ours.separator)
        assert (tokens[ends + 1] == ours.beginning[0]).all()
        assert np.count_nonzero(tokens[1:] == ours.beginning[0]) == len(ends) > 0
    if source == "with an index":
        assert text.flaws() == NO_FLAWS


def test_an_index_counts_the_token_before_each_document_and_is_of_jobs_that_have_one(tmp_path: Path, make_job) -> None:
    path = FAMILIES["llama 3"].write(tmp_path)
    texts = ["a thing", "another thing", "a third"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = [{"name": "a", "files": [str(tmp_path / "a.jsonl")]}]
    section = {"source": "streamed", "sources": sources, "tokenizer": str(path), "held_out_ratio": 1e-6}
    with_one, without = (
        make_job(data={**section, "begin_token": begin_token})["data"] for begin_token in ("tokenizer", "none")
    )
    totals = {}
    for name, data in (("with", with_one), ("without", without)):
        made = data_indexing.make(data, tmp_path / name, 1, progress=False)
        assert made is not None
        totals[name] = made.token_count
    ours = load(path)
    assert totals["with"] == len(joined(ours, [text.encode() for text in texts])) + 1
    assert totals["with"] - totals["without"] == len(texts)
    section = DataSection.model_validate(with_one | {"index": "x"})
    index, _ = data_index.read(EVERYTHING, str(tmp_path / "without"))
    problem = data_index.misfit(index, section, ours.digest, lambda path: None)
    assert problem is not None
    assert "the job has the tokenizer with the digest" in problem.message
    assert problem.message.endswith("with a token before each document (data.begin_token).")
    index, _ = data_index.read(EVERYTHING, str(tmp_path / "with"))
    assert data_index.misfit(index, section, ours.digest, lambda path: None) is None


QUICK = [f"the quick brown fox jumps over the lazy dog {n}" for n in range(300)]


def sentencepiece_of(path: Path, **options: Any) -> Path:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(QUICK), model_writer=written, model_type="bpe", minloglevel=2, **options
    )
    path.write_bytes(written.getvalue())
    return path


@pytest.mark.parametrize("cut", [0, 3, 4, 9, 10])
def test_nothing_is_put_where_a_document_goes_on(cut: int, tmp_path: Path) -> None:
    """Models that put a space before each text put none before a part of one."""
    kept = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity", "byte_fallback": True}
    model = sentencepiece_of(tmp_path / "keeps.model", vocab_size=330, **kept)
    prepended = Tokenizer(models.BPE({SPACE: 0, **{c: n for n, c in enumerate("abcdefghijklmnopqrstuvwxyz ", 1)}}, []))
    prepended.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    prepended.decoder = decoders.Fuse()
    prepended.save(str(tmp_path / "prepends.json"))
    spaced = Tokenizer(models.BPE({SPACE: 0, **{c: n for n, c in enumerate("abcdefghijklmnopqrstuvwxyz", 1)}}, []))
    spaced.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    spaced.decoder = decoders.Fuse()
    spaced.save(str(tmp_path / "spaces.json"))
    text = b"the quick brown fox"
    for path in (model, tmp_path / "prepends.json", tmp_path / "spaces.json"):
        ours = load(path, separator=0, begin_token="none")
        parts = [text[:cut], Continuation(text[cut:])]
        encoded = ours.encode(parts)
        assert ours.counts(parts) == list(map(len, encoded))
        assert ours.decode(np.concatenate(encoded).tolist()).replace(SPACE, " ").strip() == text.decode()
        spaces = [tokens.tolist().count(ours.encode([b" "])[0][0]) for tokens in encoded]
        if path.suffix == ".json":
            assert sum(spaces) == text.count(b" ") + (1 if cut else 0), "the one before the text, and its own"


def test_a_model_that_takes_spaces_away_gets_one_where_a_document_goes_on(tmp_path: Path) -> None:
    """Where SentencePiece removes the space at a part's end, the one that it puts before the next stands for it."""
    ours = load(sentencepiece_of(tmp_path / "strips.model", vocab_size=60), separator=0, begin_token="none")
    encoded = ours.encode([b"the quick ", Continuation(b"brown fox")])
    assert ours.decode(np.concatenate(encoded).tolist()) == "the quick brown fox"
