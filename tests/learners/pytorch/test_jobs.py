"""Live PyTorch jobs of the guide's page: killed, resumed, and exported to what loads."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.documents import ROOT
from tests.learners.pytorch.small_models import (
    ADAPTERS,
    JOB,
    MODULE,
    OWN_MODULE,
    SMALL,
    saved,
    torch,
    transformers,
)
from tests.learners.pytorch.test_shared import saved as decoder_of_kind
from tests.ray.jobs import gone
from tests.waiting import wait_until


class Shell:
    """The command line of this environment, in a folder that has the page's files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        package = folder / "packages" / "mypackage"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "models.py").write_text(MODULE)

    def atoll(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "api.cli", *arguments, "--home", str(self.folder / "home")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, name: str) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.atoll("status", name, "--json"))
        return shown

    def submit(self, document: dict[str, Any], *options: str) -> str:
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(document))
        return str(json.loads(self.atoll("submit", str(path), "--json", *options))["job"])


def merges_of(job: dict[str, Any]) -> int:
    return sum(int(fragment["version"]) for fragment in job["fragments"])


def processes_of(folder: Path, island: str, incarnation: int) -> list[int]:
    """Return the process numbers of an island of two processes, by rank, from its logbooks."""
    books = [folder / f"{island}{rank}-{incarnation}.log" for rank in ("", "-host1")]
    wait_until(lambda: all(book.exists() and "is process" in book.read_text() for book in books), "logbooks")
    return [int(re.findall(r"is process (\d+)", book.read_text())[-1]) for book in books]


@pytest.mark.soak("two live jobs with two islands each")
def test_an_island_of_two_processes_on_one_node_dies_as_one_and_is_resumed_as_one_process(tmp_path: Path) -> None:
    shell, folder = Shell(tmp_path), saved(tmp_path / "models" / "gpt2")
    entry = JOB["islands"][0]
    document = {**JOB, "trainer": {"kind": "torch", "model": str(folder)}, "budget": {"steps": 100_000}}
    shell.atoll("up", "--runs", str(tmp_path / "runs"), "--data", str(tmp_path))
    try:
        job = shell.submit(document | {"islands": [entry | {"processes_per_host": 2}, *JOB["islands"][1:]]})
        name = entry["node_group"]

        def trained(job: str, incarnation: int, since: int = 0) -> int:
            """Return the steps of the island of two processes, after 20 more of this life and a merge; 0 before."""
            shown = shell.job(job)
            assert shown["state"] not in ("failed", "cancelled"), shown
            (own,) = (each for each in shown["islands"] if each["island"] == name)
            is_it = (own["state"], own["incarnation"]) == ("training", incarnation) and merges_of(shown) > 0
            return int(own["steps_total"]) if is_it and own["steps_total"] >= since + 20 else 0

        logs = tmp_path / "runs" / job / "logs" / "islands"
        last = wait_until(lambda: trained(job, 1), "steps of the island", 2.0)
        first = processes_of(logs, name, 1)
        os.kill(first[1], signal.SIGKILL)
        wait_until(lambda: all(map(gone, first)), "the end of its other process")
        wait_until(lambda: trained(job, 2, last), "steps of its next life", 2.0)
        pids = processes_of(logs, name, 2)
        assert not any(map(gone, pids))
        shell.atoll("checkpoint", job)
        wait_until(lambda: json.loads(shell.atoll("checkpoints", job, "--json")), "a checkpoint", 2.0)
        shell.atoll("cancel", job)
        wait_until(lambda: all(map(gone, pids)), "the end of its processes")
        done = merges_of(shell.job(job))
        resumed = shell.submit(document, "--resume", job)
        wait_until(lambda: trained(resumed, 1), "steps of the resumed job", 2.0)
        wait_until(lambda: merges_of(shell.job(resumed)) > done, "a merge of the resumed job", 2.0)
        shell.atoll("cancel", resumed)
    finally:
        shell.atoll("down")


FORMATS = {"folder": "huggingface", "module": "safetensors", "adapters": "peft"}


@pytest.mark.soak("three live jobs with two islands each")
@pytest.mark.parametrize("which", FORMATS)
def test_a_job_of_the_page_is_killed_and_resumed_and_its_export_loads(tmp_path: Path, which: str) -> None:
    shell, folder = Shell(tmp_path), saved(tmp_path / "models" / "gpt2")
    own_part = {"folder": JOB, "module": OWN_MODULE, "adapters": ADAPTERS}[which]
    if which != "module":
        own_part = {**own_part, "trainer": {**own_part["trainer"], "model": str(folder)}}
    document = {**JOB, **own_part, "budget": {"steps": 100_000}}
    runs = ("--runs", str(tmp_path / "runs"), "--data", str(tmp_path), "--allow", "mypackage")
    shell.atoll("up", *runs, "--packages", str(tmp_path / "packages"))
    try:
        job = shell.submit(document)

        def merges() -> int:
            shown = shell.job(job)
            assert shown["state"] not in ("failed", "cancelled"), shown
            return merges_of(shown)

        wait_until(lambda: merges() >= 4, "four merges", 2.0)
        shell.atoll("kill", job, "europe")
        before = merges()
        wait_until(lambda: merges() >= before + 6, "merges after the kill", 2.0)
        shell.atoll("checkpoint", job)
        wait_until(lambda: json.loads(shell.atoll("checkpoints", job, "--json")), "a checkpoint", 2.0)
        shell.atoll("cancel", job)
        done = merges_of(shell.job(job))
        job = shell.submit(document, "--resume", job)
        wait_until(lambda: merges() >= done + 2, "merges of the resumed job", 2.0)
        shell.atoll("export", job, "--out", str(tmp_path / "out"), "--format", FORMATS[which])
        shell.atoll("cancel", job)
    finally:
        shell.atoll("down")
    if which != "module":
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder if which == "adapters" else tmp_path / "out")
        if which == "adapters":
            loaded = pytest.importorskip("peft").PeftModel.from_pretrained(loaded, str(tmp_path / "out"))
        answer = loaded.generate(input_ids=torch.tensor([list(b"def ")]), max_new_tokens=4, do_sample=False)
        assert answer.shape[1] > 4
    else:
        from safetensors.torch import load_file

        module = ModuleType("models")
        exec(compile(MODULE, "pytorch.md", "exec"), vars(module))
        built = module.build({}, OWN_MODULE["trainer"]["settings"])
        built.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.soak("a live job with an island in JAX and one in PyTorch")
def test_islands_in_jax_and_in_pytorch_train_one_decoder_and_each_returns_by_the_state_of_the_other(
    tmp_path: Path,
) -> None:
    shell, folder = Shell(tmp_path), decoder_of_kind(tmp_path / "models" / "llama", "llama")
    us, europe = JOB["islands"]
    document = {name: value for name, value in JOB.items() if name != "trainer"} | {
        "model": {"initial_weights": str(folder), "compute_dtype": "float32"},
        "islands": [us, europe | {"framework": "torch"}],
        "budget": {"steps": 100_000},
    }
    shell.atoll("up", "--runs", str(tmp_path / "runs"), "--data", str(tmp_path))
    try:
        job = shell.submit(document)

        def trains(island: str, incarnation: int) -> bool:
            shown = shell.job(job)
            assert shown["state"] not in ("failed", "cancelled"), shown
            (own,) = (each for each in shown["islands"] if each["island"] == island)
            return (own["state"], own["incarnation"]) == ("training", incarnation)

        for name in ("us-east", "europe"):
            wait_until(lambda name=name: trains(name, 1), f"training of {name}", 2.0)
        for name in ("europe", "us-east"):  # the other one gives its moments
            before = merges_of(shell.job(job))
            shell.atoll("kill", job, name)
            wait_until(lambda name=name: trains(name, 2), f"the next life of {name}", 2.0)
            wait_until(lambda before=before: merges_of(shell.job(job)) >= before + 4, "merges of both", 2.0)
        shell.atoll("export", job, "--out", str(tmp_path / "out"), "--format", "huggingface")
        shell.atoll("cancel", job)
    finally:
        shell.atoll("down")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert not torch.allclose(loaded(tokens).logits, before(tokens).logits, atol=0.1)


@pytest.mark.soak("two live jobs with two islands each")
def test_adapters_send_at_most_a_hundredth_of_what_the_whole_model_sends(tmp_path: Path) -> None:
    shell, folder = Shell(tmp_path), tmp_path / "models" / "wide"
    config = transformers.GPT2Config(n_positions=64, n_embd=192, n_layer=3, n_head=4, **SMALL)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    document = {
        **JOB,
        "trainer": {"kind": "torch", "model": str(folder)},
        "synchroniser": {"fragments": 2, "interval_steps": 8},
        "budget": {"steps": 32},
    }
    shell.atoll("up", "--runs", str(tmp_path / "runs"), "--data", str(tmp_path))
    try:
        sent = {}
        for part in (None, {"lora": {"rank": 2, "alpha": 4, "targets": ["c_attn"]}}):
            job = shell.submit(document | ({} if part is None else {"trainable": part}))
            wait_until(lambda job=job: shell.job(job)["state"] == "completed", "the end of the job", 2.0)
            lines = [island["line"] for island in shell.job(job)["islands"]]
            payload_count = sum(line["up_payloads"] for line in lines)
            assert payload_count > 2
            up, down = sum(line["up_bytes"] for line in lines), sum(sum(line["down_bytes"].values()) for line in lines)
            sent[part is None] = up / payload_count, down
    finally:
        shell.atoll("down")
    for whole, adapters in zip(sent[True], sent[False], strict=True):
        assert 0 < adapters <= 0.01 * whole, sent
    print("bytes up in a payload, and bytes down:", sent)
