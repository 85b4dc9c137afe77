"""Parameters are taken out of a job, running or ended, by REST and by the command."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from safetensors.numpy import load, load_file, save_file

from api.auth.permissions import Role
from api.client import Client
from orchestrator.host.records import FRAGMENTS, FragmentRow, write_parameters
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.huggingface import export as huggingface
from orchestrator.parameters.tensors import digest, shapes
from orchestrator.specification.config import parse_job
from orchestrator.specification.training_sections import BUILT_IN_TRAINER
from tests.api.installation import Installation
from tests.documents import DOCS, blocks
from tests.learners.tokenizers_of import FAMILIES
from tests.waiting import wait_until


def test_a_running_job_gives_its_parameters_and_keeps_no_copy(
    service: Installation, client: Client, http: httpx.Client
) -> None:
    job = client.submit(service.spec()).job
    answer = http.get(f"/v1/jobs/{job}/parameters")
    assert answer.status_code == 200
    assert list(load(answer.content)) == ["embed"]
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert not list(Path(client.job(job).run_dir).glob("*.safetensors"))


def test_the_command_writes_the_parameters_and_what_they_are_of(service: Installation, tmp_path: Path) -> None:
    with service.client() as client:
        job = client.submit(service.spec()).job
    out = tmp_path / "out"
    assert "model.safetensors" in service.atoll("export", "latest", "--out", str(out))
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert np.all(load_file(out / "model.safetensors")["embed"] == 0.5)
    described = json.loads((out / "config.json").read_text())
    assert (described["job"], described["spec"]["trainer"]) == (job, "learners.synthetic:create")
    assert "already exists" in service.atoll("export", "latest", "--out", str(out), code=2)
    service.atoll("export", "latest", "--format", "orbax", "--out", str(out))
    assert (out / "checkpoint").is_dir()
    assert not list(out.glob("*.draft"))


def test_the_command_writes_what_transformers_loads_or_says_why_not(service: Installation, tmp_path: Path) -> None:
    decoder = {
        "width": 4,
        "layer_count": 1,
        "head_count": 1,
        "key_value_head_count": 1,
        "head_size": 4,
        "hidden_size": 4,
    }
    with service.client() as client:
        job = client.submit(service.spec()).job
        plain = client.submit(service.spec(model={"decoder": decoder})).job
        client.cancel(plain)
        folder = Path(client.job(plain).run_dir)
    refused = service.atoll("export", job, "--format", "huggingface", "--out", str(tmp_path / "x"), code=2)
    assert "its trainer is learners.synthetic:create" in refused
    assert not (tmp_path / "x").exists()
    (tmp_path / "y").mkdir()
    service.atoll("export", job, "--format", "huggingface", "--out", str(tmp_path / "y"), code=2)
    assert not list((tmp_path / "y").iterdir())
    spec = parse_job(service.spec(model={"decoder": decoder}))
    tensors = {name: np.ones(shape, np.float32) for name, shape in parameter_shapes(spec.model.network).items()}
    write_parameters(folder, shapes(tensors), [tensors], {"job": plain, "spec": spec.model_dump_json()})
    out = tmp_path / "out"
    assert "transformers can load" in service.atoll("export", plain, "--format", "huggingface", "--out", str(out))
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    assert load_file(out / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].shape == (4, 4)


def test_the_tokenizer_of_a_job_goes_with_its_model_while_it_is_the_one_that_it_was(
    service: Installation, http: httpx.Client, tmp_path: Path
) -> None:
    decoder = {
        "width": 4,
        "layer_count": 1,
        "head_count": 1,
        "key_value_head_count": 1,
        "head_size": 4,
        "hidden_size": 4,
    }
    kept = service.folder / "data" / "tokenizer.json"
    kept.parent.mkdir(exist_ok=True)
    content = json.dumps(
        {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "</s>", "special": True}]}
    )
    kept.write_text(content)
    document = service.spec(model={"decoder": decoder}, data={"tokenizer": str(kept)})
    with service.client() as client:
        bare = client.submit(service.spec(steps=1)).job
        job = client.submit(document).job
        client.cancel(job)
        folder, spec = Path(client.job(job).run_dir), parse_job(document)
    assert http.get(f"/v1/jobs/{bare}/tokenizer").status_code == 404
    assert http.get(f"/v1/jobs/{job}/tokenizer").text == content
    tensors = {name: np.ones(shape, np.float32) for name, shape in parameter_shapes(spec.model.network).items()}
    write_parameters(folder, shapes(tensors), [tensors], {"job": job, "spec": spec.model_dump_json()})
    out = tmp_path / "out"
    assert "AutoTokenizer" in service.atoll("export", job, "--format", "huggingface", "--out", str(out))
    assert (out / "tokenizer.json").read_text() == content
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 2
    assert not [path for path in out.iterdir() if "draft" in path.name]
    kept.write_text(content.replace('"b"', '"c"'))
    assert http.get(f"/v1/jobs/{job}/tokenizer").text == content, "the run's folder has a copy"
    (folder / "tokenizer").unlink()
    refused = http.get(f"/v1/jobs/{job}/tokenizer")
    assert refused.status_code == 409
    assert "was submitted with" in refused.json()["detail"]
    told = service.atoll("export", job, "--format", "huggingface", "--out", str(tmp_path / "other"))
    assert "The export has no tokenizer" in told
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["config.json", "model.safetensors"]


def continued(folder: Path) -> dict[str, str]:
    """The folder has a small published checkpoint with all that goes with it. Returns its small files."""
    folder.mkdir(parents=True)
    spec = parse_job({"islands": [{"node_group": "a"}], "budget": {"steps": 1}, "model": {"decoder": DECODER}})
    save_file(ones(DECODER), folder / "parameters")
    huggingface.write(folder / "parameters", folder, spec.model_dump(mode="json"))
    (folder / "parameters").unlink()
    FAMILIES["qwen 3, instructed"].write(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 8192, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}⚓")
    names = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "config.json")
    return {name: (folder / name).read_text() for name in names}


def ones(decoder: dict[str, Any]) -> dict[str, np.ndarray]:
    shapes = parameter_shapes(DecoderSection.model_validate(decoder))
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


DECODER = {
    "vocabulary_size": 300,
    "width": 4,
    "layer_count": 1,
    "head_count": 1,
    "key_value_head_count": 1,
    "head_size": 4,
    "hidden_size": 4,
}


def test_an_export_keeps_what_was_continued_also_when_the_checkpoint_is_gone(
    service: Installation, http: httpx.Client, tmp_path: Path
) -> None:
    weights = service.folder / "data" / "Model"
    files = continued(weights)
    document = service.spec(
        model={"decoder": DECODER, "initial_weights": str(weights)}, data={"tokenizer": str(weights / "tokenizer.json")}
    )
    with service.client() as client:
        bare = client.submit(service.spec(steps=1)).job
        job = client.submit(document).job
        client.cancel(job)
        folder = Path(client.job(job).run_dir)
        alone = document | {"trainer": BUILT_IN_TRAINER, "model": {"initial_weights": str(weights)}}
        spelt_out = parse_job(client.check(alone).specification).model
        assert spelt_out.decoder == DecoderSection.model_validate(DECODER)
    assert http.get(f"/v1/jobs/{bare}/origin").status_code == 404
    shutil.rmtree(weights)
    spec = (folder / "spec.yaml").read_text()
    write_parameters(
        folder, shapes(ones(DECODER)), [ones(DECODER)], {"job": job, "spec": json.dumps(yaml.safe_load(spec))}
    )
    out = tmp_path / "out"
    shown = service.atoll("export", job, "--format", "huggingface", "--out", str(out))
    assert "AutoTokenizer" in shown
    config = json.loads((out / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("eos", "bos", "pad")] == [2, 0, 0]
    assert config["max_position_embeddings"] == 8192
    assert json.loads((out / "generation_config.json").read_text()) == json.loads(files["generation_config.json"])
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        assert (out / name).read_text() == files[name]
    rounded = ("--dtype", "bfloat16", "--shard-gb", "0.5")
    service.atoll("export", job, "--format", "huggingface", "--out", str(tmp_path / "rounded"), *rounded)
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    halves = (tmp_path / "rounded" / "model.safetensors").stat().st_size
    assert halves < (out / "model.safetensors").stat().st_size
    refused_text = service.atoll("export", job, "--out", str(tmp_path / "x"), "--dtype", "bfloat16", code=2)
    assert "--dtype is for --format huggingface" in refused_text
    (folder / "origin.json").write_text("{")
    shown = service.atoll("export", job, "--format", "huggingface", "--out", str(tmp_path / "damaged"))
    assert "The export has no settings of the job's initial checkpoint" in shown
    (folder / "origin.json").unlink()
    refused = http.get(f"/v1/jobs/{job}/origin")
    assert refused.status_code == 409
    assert "Nothing was kept of" in refused.json()["detail"]


def test_a_file_that_does_not_say_what_it_is_of_is_refused(service: Installation, client: Client) -> None:
    job = client.submit(service.spec(steps=1)).job
    wait_until(lambda: client.job(job).state.final)
    folder = Path(client.job(job).run_dir)
    nothing = json.dumps({}).encode()
    (folder / "merged.safetensors").write_bytes(struct.pack("<Q", len(nothing)) + nothing)
    assert "has no metadata of a job" in service.atoll("export", job, "--out", str(service.folder / "x"), code=1)
    assert "job 'nobody' does not exist" in service.atoll("export", "nobody", code=2).lower()


def test_a_follower_with_a_viewer_s_token_brings_the_parameters_of_a_running_job_and_then_the_final_ones(
    service: Installation, client: Client, http: httpx.Client, tmp_path: Path
) -> None:
    job, token = client.submit(service.spec()).job, client.create_token("follower", Role.VIEWER).token
    folder = tmp_path / "followed"
    viewer = Client(client.url, token=token)
    (first,) = viewer.follow(job, folder, once=True)
    assert (first.job, first.versions, first.ended) == (job, (1,), False)
    assert np.all(load_file(folder / "current" / "model.safetensors")["embed"] == 0.5)
    assert not list(Path(client.job(job).run_dir).glob("*.updates"))
    assert "is the newest version already" in service.atoll("follow", job, str(folder), "--once")
    other = client.submit(service.spec()).job
    refused = service.atoll("follow", other, str(folder), "--once", code=2)
    assert f"follows job {job}, not {other}" in refused
    client.cancel(job)
    run_dir = Path(client.wait(job).run_dir)
    assert "left no merged.safetensors" in service.atoll("follow", job, str(folder), code=2)
    arrays = {"embed": np.full((2, 3), 0.75, np.float32)}
    row = FragmentRow(2, digest(arrays), ["embed"]).row()
    write_parameters(run_dir, shapes(arrays), [arrays], {"job": job, FRAGMENTS: json.dumps([row])})
    printed = json.loads(service.atoll("follow", job, str(folder), "--json"))
    assert (printed["versions"], printed["ended"]) == ([2], True)
    assert np.all(load_file(folder / "current" / "model.safetensors")["embed"] == 0.75)
    assert http.get(f"/v1/jobs/{job}/updates", params={"held": "1,x"}).status_code == 422
    client.delete(job)
    assert "does not exist" in service.atoll("follow", job, str(folder), code=2)


def test_the_page_on_followers_does_what_it_says(
    service: Installation, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = client.submit(service.spec()).job
    page = blocks((DOCS / "guide" / "follow.md").read_text())
    (typed,) = [block.text for block in page if block.kind == "console"]
    served = str(tmp_path / "served")  # commands of tests run elsewhere
    lines = [line.partition("#")[0].split()[2:] for line in typed.splitlines()]
    commands = [[served if word == "served" else word for word in line] for line in lines]
    (tmp_path / ".atoll").symlink_to(service.home.path)
    monkeypatch.chdir(tmp_path)
    assert f"version 1 of {job} is {served}/current" in service.atoll(*commands[0])
    code = "".join(block.text for block in page if block.kind == "python")
    names: dict[str, Any] = {}
    exec(code, names)
    assert (names["newest"] / "model.safetensors").is_file()
    assert names["newest"] == (tmp_path / "served" / "current").resolve()
    arrays = {"embed": np.full((2, 3), 0.75, np.float32)}
    client.cancel(job)
    facts = {"job": job, FRAGMENTS: json.dumps([FragmentRow(2, digest(arrays), ["embed"]).row()])}
    write_parameters(Path(client.wait(job).run_dir), shapes(arrays), [arrays], facts)
    assert f"version 2 of {job} is {served}/current" in service.atoll(*commands[1])
