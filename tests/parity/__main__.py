"""``make parity``: whether a model has the same logits here and in transformers, and a conversation the same tokens.

Theirs: transformers writes random small checkpoints of each model type, whole in float32, and in bfloat16 in several files;
they are read here, and exported again: in float32 as the nearest type, and in several files of bfloat16 as the type that
they were. Ours: small decoders of each family are exported as a job's result is, and transformers loads them, with their
tokenizers in turn: of bytes, a tokenizer.json, SentencePiece's. Continued: a checkpoint of theirs goes through a job's
export, and must have the context length, special tokens, generation config and chat template that it had. Adapted: adapters
of theirs are exported, merged and as PEFT has them, and peft loads these on top of the checkpoint. Chats: conversations have
the same tokens, and the same of them are answers, by the templates of ``chats``. Each line is the largest
difference of a logit, in standard deviations of the logits. Exits with 1 if one is above ``GOAL``, a text or a conversation
has other tokens there, or something was lost.

``python -m tests.parity published FOLDER`` (``make published``) continues a published model, SmolLM2-135M-Instruct, whose
GGUF file is somewhere in FOLDER. A real service trains it on two islands, on the source code of Python, and exports it.
Prints the held-out loss and an answer, before and after. Exits with 1 if the loss did not fall, or if an answer does not
name Paris.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from learners import tokenizer
from learners.models.decoder import decoder, logits
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.huggingface import adapters, export, origin
from orchestrator.models.huggingface.weights import Weights, described
from orchestrator.models.presets import DECODERS
from orchestrator.models.trainable import B
from orchestrator.specification.bounds import BYTES
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.training_sections import TrainableSection
from orchestrator.system.roots import EVERYTHING
from orchestrator.text import tokenizer_file
from tests.learners.tokenizers_of import FAMILIES
from tests.parity import chats

PYTHON = Path(".cache/parity/bin/python")
REFERENCE = Path(__file__).with_name("reference.py")
GOAL = 1e-4
SMALLER = {
    "vocabulary_size": 400,
    "width": 64,
    "layer_count": 7,
    "head_count": 4,
    "key_value_head_count": 2,
    "head_size": 16,
}
TEXTS = (
    "Fragments of the parameters travel; islands do not wait.",
    "  two spaces, a\ttab,\r\nand a line's end\n",
    "naïve Ångström ﬁ 日本語 \U0001f30a e\u0301",
    "def f(x: int) -> int:\n    return x  # 10_000\n",
)
LINEAR, EXPERTS = ("all-linear",), ("all-linear", "router", "experts.*")
ADAPTED = {
    "llama": LINEAR,
    "qwen3": LINEAR,
    "gemma3": LINEAR,
    "phi3": LINEAR,
    "phi3-window": ("q_proj", "v_proj", "up_proj"),
    "mixtral": EXPERTS,
    "moe": ("experts.up", "o_proj"),
    "moe-raw": ("experts.down",),
}
"""Checkpoints, and the matrices that have adapters. Several are one in phi3; experts and routers are no modules."""
JOB = {"islands": [{"node_group": "here"}], "budget": {"steps": 1}}
GROUPS = {"node_groups": [{"name": name, "region": name, "cpus": 2} for name in ("east", "west")]}
VOCABULARY_SIZE = 360
"""Of the trained tokenizers, at most."""


def main() -> int:
    with TemporaryDirectory() as folder:
        theirs, ours = Path(folder, "theirs"), Path(folder, "ours")
        theirs.mkdir()
        reference("build", theirs)
        tokens = np.load(theirs / "tokens.npy").astype(np.int32)
        differences = {f"import {path.name}": imported(path, tokens) for path in sorted(theirs.glob("*/"))}
        ours.mkdir()
        np.save(ours / "tokens.npy", tokens.astype(np.int64))
        trained = tokenizers(Path(folder))
        (ours / "texts.json").write_text(json.dumps(TEXTS))
        own, jobs = {}, {}
        for number, name in enumerate(name for name in DECODERS if name.endswith(("20m", "-1b", "-8b"))):
            own[name], jobs[name] = exported(name, ours, tokens, trained[number % len(trained)])
        continued(theirs / "llama-continued", ours)
        for name, targets in ADAPTED.items():
            own |= adapted(theirs / name, ours, tokens, targets)
        for path in sorted(theirs.glob("*/")):
            own[f"again-{path.name}"] = exported_again(path, ours, tokens)
        reference("measure", ours)
        chats.write(chat := Path(folder, "chat"))
        reference("chat", chat)
        chatted = list(chats.differences(chat))
        before, after = (json.loads((ours / name / "facts.json").read_text()) for name in ("before", "after"))
        lost = {name: (fact, after[name]) for name, fact in before.items() if fact != after[name]}
        differences |= {f"export {name}": apart(own[name], np.load(ours / name / "logits.npy")) for name in own}
        retold = {name: told(job) == json.loads((ours / name / "ids.json").read_text()) for name, job in jobs.items()}
    for name, difference in differences.items():
        print(f"{name:40} {difference:.1e}{'' if difference <= GOAL else f'   above {GOAL:.0e}'}")
    print(f"largest difference {max(differences.values()):.1e} of {len(differences)} checkpoints (goal {GOAL:.0e})")
    for name, (was, is_now) in lost.items():
        print(f"continued {name:30} WAS {was} and is {is_now}")
    if not lost:
        print(f"continued {'llama':30} the same {', '.join(before)}")
    for name, job in jobs.items():
        alike = "the same tokens" if retold[name] else "OTHER TOKENS"
        print(f"tokenizer {name:30} {alike} of {len(TEXTS)} texts, {Path(job.data.tokenizer).name}")
    for name, alike_count, unlike in chatted:
        print(
            f"chat {name:35} {alike_count} of {len(chats.CONVERSATIONS)} conversations alike{unlike and f'   {unlike}'}"
        )
    is_unlike = any(unlike for _, _, unlike in chatted)
    return int(max(differences.values()) > GOAL or not all(retold.values()) or bool(lost) or is_unlike)


def reference(command: str, folder: Path) -> str:
    return subprocess.run([PYTHON, REFERENCE, command, folder], check=True, stdout=subprocess.PIPE, text=True).stdout


def published(model: Path) -> dict[str, Any]:
    """Return the job that continues the model, small enough for two cores and some minutes."""
    return {
        "name": "smollm2",
        "model": {"initial_weights": str(model), "compute_dtype": "float32", "remat": "full"},
        "data": {"source": "builtin", "tokenizer": str(model / "tokenizer.json"), "sequence_length": 64},
        "islands": [{"node_group": "east", "batch_size": 2}, {"node_group": "west", "batch_size": 2}],
        "budget": {"steps": 12},
        "training": {"inner_optimizer": {"lr": 5e-5, "warmup_steps": 2}},
        "synchroniser": {"interval_steps": 3, "overlap_steps": 1, "fragments": 3},
        "evaluation": {"every_merges": 6, "sequences": 8},
    }


def continue_published(folder: Path) -> int:
    """Continue SmolLM2 on two islands; see the module."""
    model = folder / "model"
    if not model.exists():
        reference("unpack", folder)
    home, runs, after = folder / "home", folder / "runs", folder / "after"
    for each in (home, runs, after):
        shutil.rmtree(each, ignore_errors=True)
    (folder / "groups.yaml").write_text(json.dumps(GROUPS))
    (folder / "job.yaml").write_text(json.dumps(published(model)))

    def atoll(*arguments: str | Path) -> str:
        command = [Path(sys.executable).with_name("atoll"), *arguments, "--home", home]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    before_text = reference("ask", model)
    try:
        atoll("up", "--runs", runs, "--data", folder, "--groups", folder / "groups.yaml")
        atoll("submit", folder / "job.yaml", "--watch")
        report = json.loads(atoll("report", "latest", "--json"))
        atoll("export", "latest", "--format", "huggingface", "--out", after, "--dtype", "bfloat16", "--shard-gb", "0.1")
    finally:
        atoll("down")
    first, last = report["loss_initial"], report["loss_final"]
    after_text = reference("ask", after)
    print(f"held-out loss {first:.4f} at version 0, {last:.4f} at the end")
    print(f"before  {before_text.strip()}\nafter   {after_text.strip()}")
    return int(not last < first or "Paris" not in after_text or "Paris" not in before_text)


def imported(folder: Path, tokens: np.ndarray) -> float:
    config = described(str(folder), EVERYTHING)
    return apart(
        computed(config, Weights(config, str(folder), EVERYTHING).taken(), tokens), np.load(folder / "logits.npy")
    )


def tokenizers(folder: Path) -> list[str]:
    """What ``data.tokenizer`` may be, of each kind one: bytes, BPE of bytes, and SentencePiece's two."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    bpe.save(str(folder / "tokenizer.json"))
    for kind in ("unigram", "bpe"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 8),
            model_prefix=str(folder / kind),
            model_type=kind,
            vocab_size=VOCABULARY_SIZE,
            byte_fallback=kind == "bpe",
            hard_vocab_limit=False,
            minloglevel=2,
        )
    return [BYTES, *(str(folder / name) for name in ("tokenizer.json", "unigram.model", "bpe.model"))]


def told(job: JobSpec) -> list[list[int]]:
    """The tokens of each text, as islands of the job make them."""
    return [each.tolist() for each in tokenizer.load(job.data, EVERYTHING).encode([text.encode() for text in TEXTS])]


def exported(name: str, folder: Path, tokens: np.ndarray, path: str) -> tuple[np.ndarray, JobSpec]:
    """The logits of a small decoder like the preset, of which ``folder`` has an export afterwards; and its job.

    ``path`` is the job's tokenizer.
    """
    preset, sizes = DECODERS[name], dict(SMALLER)
    if preset.window is not None:
        sizes["window"] = 8
    if preset.experts is None:
        sizes["hidden_size"] = 112
    config = DecoderSection.model_validate(preset.model_dump() | sizes)
    drawn = np.random.default_rng(7)
    parameters = {
        each: (np.asarray(start) + 0.1 * drawn.standard_normal(start.shape)).astype(np.float32)
        for each, start in decoder(config, "float32").initialise(7).items()
    }
    assert {each: array.shape for each, array in parameters.items()} == parameter_shapes(config)
    target, merged = folder / name, folder / f"{name}.safetensors"
    target.mkdir()
    job = job_of(config, path)
    save_file(parameters, merged)
    copy = None if path == BYTES else Path(path)
    export.write(merged, target, json.loads(job.model_dump_json()), copy)
    return computed(config, parameters, tokens), job


def exported_again(checkpoint: Path, folder: Path, tokens: np.ndarray) -> np.ndarray:
    """The logits of a checkpoint of theirs, of which ``folder`` has an export, without a tokenizer, afterwards."""
    target, merged = folder / f"again-{checkpoint.name}", folder / f"{checkpoint.name}.safetensors"
    target.mkdir()
    config = described(str(checkpoint), EVERYTHING)
    parameters = Weights(config, str(checkpoint), EVERYTHING).taken()
    save_file(parameters, merged)
    spec = json.loads(job_of(config, BYTES).model_dump_json())
    if checkpoint.name.endswith("bfloat16"):
        whole = origin.taken(str(checkpoint), EVERYTHING)
        export.write(merged, target, spec, origin=whole, dtype="bfloat16", shard_bytes=60_000)
        was = json.loads((checkpoint / "config.json").read_text())["model_type"]
        now = json.loads((target / "config.json").read_text())["model_type"]
        assert now == {"gemma3": "gemma3_text", "llava": "llama"}.get(was, was), (was, now)
        assert len(list(target.glob("*.safetensors"))) > 1
    else:
        export.write(merged, target, spec)
    for path in target.glob("tokenizer*"):
        path.unlink()
    return computed(config, parameters, tokens)


def continued(checkpoint: Path, folder: Path) -> None:
    """Write into ``folder`` the checkpoint with a tokenizer and chat template, ``before``, and a job's export, ``after``."""
    before, after = folder / "before", folder / "after"
    shutil.copytree(checkpoint, before)
    generation = (before / "generation_config.json").read_text()
    path = FAMILIES["llama 3, instructed"].write(before)
    (before / "generation_config.json").write_text(json.dumps(json.loads(generation) | {"temperature": 0.6}))
    (before / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ bos_token + m.content + eos_token }}{% endfor %}"
    )
    after.mkdir()
    config = described(str(before), EVERYTHING)
    save_file(Weights(config, str(before), EVERYTHING).taken(), folder / "continued.safetensors")
    spec = json.loads(job_of(config, str(path)).model_dump_json())
    file = tokenizer_file.read(EVERYTHING, str(path))
    spec["data"] |= {"tokenizer_digest": file.digest, "separator": file.end_of_text, "begin_token": file.begin_of_text}
    export.write(folder / "continued.safetensors", after, spec, path, origin.taken(str(before), EVERYTHING))


def adapted(checkpoint: Path, folder: Path, tokens: np.ndarray, targets: Sequence[str]) -> dict[str, np.ndarray]:
    """The logits of a checkpoint with adapters, of which ``folder`` has the adapters and the merged model afterwards."""
    config = described(str(checkpoint), EVERYTHING)
    base = Weights(config, str(checkpoint), EVERYTHING)
    model = {"decoder": config.model_dump(mode="json"), "initial_weights": str(checkpoint)}
    part = {"lora": {"rank": 3, "alpha": 5.0, "targets": list(targets)}}
    spec = json.loads(parse_job({**JOB, "model": model, "trainable": part}).model_dump_json())
    section = TrainableSection.model_validate(part)
    drawn = np.random.default_rng(7)
    own = {
        name: (0.2 * drawn.standard_normal(shape)).astype(np.float32)
        for name, shape in section.trained_shapes(config).items()
    }
    save_file(own, file := folder / f"{checkpoint.name}.adapters")
    names = {"peft": f"{checkpoint.name}-peft", "merged": f"{checkpoint.name}-merged"}
    for name in names.values():
        (folder / name).mkdir()
    whole = origin.taken(str(checkpoint), EVERYTHING)
    adapters.write(file, folder / names["peft"], spec, whole)
    export.write(file, folder / names["merged"], spec, origin=whole, base=base)
    for path in (folder / names["merged"]).glob("tokenizer*"):
        path.unlink()
    scaled = {name: tensor * (5 / 3 if name.endswith(B) else 1) for name, tensor in own.items()}
    here = computed(config, base.taken() | scaled, tokens)
    return dict.fromkeys(names.values(), here)


def job_of(config: DecoderSection, tokenizer_path: str) -> JobSpec:
    return parse_job(
        {
            **JOB,
            "model": {"decoder": config.model_dump(mode="json")},
            "data": {"tokenizer": tokenizer_path},
        }
    )


def computed(config: DecoderSection, parameters: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda p, t: logits(config, jnp.float32, p, t))(parameters, tokens))


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / other.std())


if __name__ == "__main__":
    sys.exit(continue_published(Path(sys.argv[2]).resolve()) if sys.argv[1:2] == ["published"] else main())
