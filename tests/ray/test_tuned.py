"""Fine-tuning as a user types it: adapters on conversations, an island killed, the job resumed, its results exported.

The base is a small random model like Qwen 3 with a tokenizer and a chat template beside it, as published models have them.
Where the environment of `make parity` exists, peft and transformers load both exports, and must answer alike.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml
from array_record.python.array_record_module import ArrayRecordWriter
from safetensors.numpy import load_file, save_file

from api.client import Client
from api.schemas import Job
from orchestrator.models.decoder import DecoderSection
from orchestrator.models.huggingface import export
from orchestrator.specification.config import parse_job
from tests.learners.test_conversations import CHATML, said
from tests.learners.test_pretrained import drawn
from tests.learners.tokenizers_of import FAMILIES
from tests.newcomer import Newcomer
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.soak("three jobs of adapters and two of whole models"),
    pytest.mark.timeout(1200),
]
PARITY = Path(".cache/parity/bin/python")
PROGRAM = ".venv/bin/python -m api.cli "
ISLANDS = ("us-east", "asia")
DECODER = {
    "vocabulary_size": 280, "width": 32, "layer_count": 2, "head_count": 2, "key_value_head_count": 1, "head_size": 16,
    "hidden_size": 64, "query_key_norm": True,
}  # fmt: skip
QUESTIONS = [{"messages": said(f"{n} and 1?", f"it is {n + 1}", "sure?", "yes", system="count")} for n in range(400)]


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    somebody = Newcomer(tmp_path_factory.mktemp("tuned"))
    data = somebody.folder / "data"
    base = data / "base"
    base.mkdir(parents=True)
    spec = parse_job({"islands": [{"node_group": "a"}], "budget": {"steps": 1}, "model": {"decoder": DECODER}})
    weights = {name: 0.2 * tensor for name, tensor in drawn(DecoderSection.model_validate(DECODER)).items()}
    weights |= {name: np.ones_like(tensor) for name, tensor in weights.items() if name.endswith("norm")}
    save_file(weights, data / "drawn")
    export.write(data / "drawn", base, spec.model_dump(mode="json"))
    FAMILIES["qwen 3, instructed"].write(base)
    (base / "chat_template.jinja").write_text(CHATML)
    lines = [json.dumps(question) for question in QUESTIONS]
    (data / "chats.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pa.Table.from_pylist(QUESTIONS), data / "chats.parquet", row_group_size=50)
    writer = ArrayRecordWriter(str(data / "chats.arrayrecord"), "group_size:1")
    for line in lines:
        writer.write(line.encode())
    writer.close()
    try:
        somebody.type(f'atoll() {{ {PROGRAM} "$@"; }}; atoll up --data {data}')
        yield somebody
    finally:
        somebody.cancel_jobs()
        somebody.leave()


def job_of(newcomer: Newcomer, **changes: Any) -> str:
    """Write the job and return its file's name."""
    data = newcomer.folder / "data"
    document = {
        "name": "tuned",
        "model": {"initial_weights": str(data / "base"), "compute_dtype": "float32"},
        "data": {
            "source": "files",
            "files": [str(data / "chats.jsonl")],
            "format": "chat",
            "tokenizer": str(data / "base/tokenizer.json"),
            "sequence_length": 128,
            "held_out_ratio": 0.1,
        },
        "trainable": {"lora": {"rank": 4}},
        "training": {"batch_size": 4, "inner_optimizer": {"lr": 0.01, "warmup_steps": 5}},
        "synchroniser": {"fragments": 2, "interval_steps": 8, "overlap_steps": 2},
        "islands": [{"node_group": group} for group in ISLANDS],
        "evaluation": {"every_merges": 8, "sequences": 16},
        "budget": {"steps": 100_000},
        **changes,
    }
    path = newcomer.folder / f"{document['name']}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path.name


def latest(client: Client) -> Job:
    return client.job(client.jobs()[0].job)


def island(job: Job, name: str) -> Any:
    return next(each for each in job.islands if each.island == name)


def until(client: Client, what: Callable[[Job], bool], words: str) -> Job:
    wait_until(lambda: what(latest(client)), words)
    return latest(client)


def test_preferences_are_learned_through_a_death_and_become_an_adapter(newcomer: Newcomer) -> None:
    """DPO, from the pairs to what peft loads, with an island killed on the way. The loss begins at that of a coin."""
    answers = [[{"role": "assistant", "content": text}] for text in ("yes, of course", "no!")]
    rows = [
        {"prompt": [{"role": "user", "content": f"may {n}?"}], "chosen": answers[0], "rejected": answers[1]}
        for n in range(400)
    ]
    folder = newcomer.folder / "data"
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet", row_group_size=50)
    data = {
        "source": "files",
        "files": [str(folder / "pairs.parquet")],
        "format": "preference",
        "tokenizer": str(folder / "base/tokenizer.json"),
        "sequence_length": 191,
        "held_out_ratio": 0.1,
    }
    training = {
        "batch_size": 4,
        "objective": {"kind": "dpo", "beta": 0.3},
        "inner_optimizer": {"lr": 0.01, "warmup_steps": 5},
    }
    newcomer.type(f"atoll submit {job_of(newcomer, name='preferred', data=data, training=training)}")
    with Client.at(newcomer.home.path) as client:
        until(
            client,
            lambda job: all(each.last_merge_after_s is not None for each in job.islands),
            "merges of both islands",
        )
        newcomer.type("atoll chaos kill latest asia")
        until(client, lambda job: island(job, "asia").incarnation > 1, "asia's second life")
        until(client, lambda job: island(job, "asia").state == "training", "asia's return")
        until(client, lambda job: losses(job)[-1:] < [0.5], "a loss below that of a coin")
        newcomer.type("atoll finish latest")
        last = client.wait(latest(client).job)
    assert last.state == "completed"
    assert losses(last)[0] == pytest.approx(math.log(2), abs=1e-3)
    assert losses(last)[-1] < 0.5
    newcomer.type(f"atoll export {last.job} --format peft --out preferred-adapter")
    newcomer.type(f"atoll export {last.job} --format huggingface --out preferred-whole")
    same_model(newcomer.folder, "preferred-")


def test_adapters_learn_conversations_through_a_death_and_a_resumption_and_become_a_model(newcomer: Newcomer) -> None:
    with Client.at(newcomer.home.path) as client:
        newcomer.type(f"atoll submit {job_of(newcomer)}")
        until(
            client,
            lambda job: all(each.last_merge_after_s is not None for each in job.islands),
            "merges of both islands",
        )
        newcomer.type("atoll chaos kill latest asia")
        until(client, lambda job: island(job, "asia").incarnation > 1, "asia's second life")
        until(client, lambda job: island(job, "asia").state == "training", "asia's return")
        newcomer.type("atoll checkpoint latest")
        first = latest(client)
        wait_until(lambda: bool(client.checkpoints(first.job)), "a checkpoint")
        newcomer.type("atoll cancel latest")
        client.wait(first.job)
        tokens = client.checkpoints(first.job)[-1].tokens_trained
        resumed = job_of(newcomer, budget={"tokens": tokens + 200 * 4 * 128})
        newcomer.type(f"atoll submit {resumed} --resume {first.job}")
        last = client.wait(latest(client).job)
        assert last.state == "completed"
        refused = newcomer.attempt(
            f"atoll submit {job_of(newcomer, trainable={'lora': {'rank': 3}})} --resume {first.job}"
        )
        assert refused[0] != 0
        assert "trainable.lora.rank was 4 but is 3" in refused[1]
    newcomer.type(f"atoll export {last.job} --format peft --out adapter")
    newcomer.type(f"atoll export {last.job} --format huggingface --out whole")
    same_model(newcomer.folder)
    if PARITY.exists():
        loaded_elsewhere(newcomer.folder)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("parquet", {"source": "files", "files": ["chats.parquet"]}),
        ("records", {"source": "streamed", "sources": [{"name": "chats", "files": ["chats.arrayrecord"]}]}),
    ],
)
def test_conversations_of_other_files_are_learned(newcomer: Newcomer, name: str, data: dict[str, Any]) -> None:
    folder = newcomer.folder / "data"
    sources = [
        {**source, "files": [str(folder / file) for file in source["files"]]} for source in data.pop("sources", ())
    ]
    own = {
        **data,
        "files": [str(folder / file) for file in data.get("files", ())],
        **({"sources": sources} if sources else {}),
        "format": "chat",
        "tokenizer": str(folder / "base/tokenizer.json"),
        "sequence_length": 128,
        "held_out_ratio": 0.1,
    }
    newcomer.type(f"atoll submit {job_of(newcomer, name=name, data=own, trainable=None, budget={'steps': 60})}")
    with Client.at(newcomer.home.path) as client:
        job = client.wait(latest(client).job)
    assert job.state == "completed"
    assert losses(job)[-1] < 0.7 * losses(job)[0]


def losses(job: Job) -> list[float]:
    return [point.loss for point in job.loss_curve if point.loss is not None]


def same_model(folder: Path, named: str = "") -> None:
    """The adapters, put into the base as their paper says, are the merged export; and they are not zero."""
    config = json.loads((folder / f"{named}adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "data/base")
    own, scale = load_file(folder / f"{named}adapter/adapter_model.safetensors"), config["lora_alpha"] / config["r"]
    base, whole = (
        load_file(folder / "data/base/model.safetensors"),
        load_file(folder / f"{named}whole/model.safetensors"),
    )
    assert base.keys() == whole.keys()
    for name, tensor in base.items():
        theirs = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
        if (a := own.pop(theirs.format("A"), None)) is not None:
            change = scale * own.pop(theirs.format("B")) @ a
            assert np.abs(change).max() > 1e-3
            tensor = tensor + change
        np.testing.assert_allclose(whole[name], tensor, atol=1e-5, err_msg=name)
    assert not own
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / f"{named}whole" / name).read_text() == (folder / "data/base" / name).read_text()


def loaded_elsewhere(folder: Path) -> None:
    """peft and transformers load both, and both answer a question as the job's conversations do."""
    done = subprocess.run(
        [PARITY, "tests/parity/reference.py", "answer", folder, "7 and 1?"], capture_output=True, text=True, check=True
    )
    adapted, whole = json.loads(done.stdout)
    assert adapted == whole
    assert adapted.startswith("it is "), adapted
