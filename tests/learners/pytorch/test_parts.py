"""A part of a PyTorch model is trained: adapters, chosen tensors, and frozen weights in fewer bits."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from api.commands.checkpoints import merged_in_torch
from api.jobs.path_check import with_weights_digest
from learners.factories import trainer_of
from learners.island_spec import IslandSpec
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.models.huggingface import adapters, export, origin
from orchestrator.models.huggingface.configuration import decoder_of
from orchestrator.models.huggingface.layout import sources_of
from orchestrator.system.roots import EVERYTHING
from tests.learners.pytorch.small_models import (
    CONFIGS,
    LORA,
    chat,
    llama,
    losses,
    own,
    saved,
    spec_of,
    torch,
    torch_model,
    trained,
    transformers,
)


def exported(tmp_path: Path, trainer: Any, spec: IslandSpec, form: str) -> Path:
    """Return the folder of an export as ``atoll export`` writes it."""
    from safetensors.numpy import save_file

    parameters, out = tmp_path / f"{form}.safetensors", tmp_path / form
    out.mkdir()
    save_file(trainer.snapshot(trainer.tensor_shapes()).arrays(), parameters)
    document = json.loads(spec.job.model_dump_json())
    if form == "peft":
        adapters.write(parameters, out, document)
    else:
        document, parameters = merged_in_torch(document, parameters, None)
        kept = origin.taken(spec.job.trainer.model or "", EVERYTHING)
        export.write(parameters, out, document, None, kept, dtype="float32", shard_bytes=40_000)
        assert (out / "model.safetensors.index.json").exists()
    return out


@pytest.mark.parametrize("kind", ["gpt2", "phi"])
def test_adapters_alone_travel_and_peft_and_transformers_load_what_is_exported(tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    folder = saved(tmp_path / kind, kind)
    spec = spec_of(folder, model={"compute_dtype": "float32", "remat": "full"}, **LORA)
    trainer = trained(spec)
    assert {name.split(".lora_")[1] for name in trainer.tensor_shapes()} == {"A.default.weight", "B.default.weight"}
    plain = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(12)[None] % 256
    base, mine_ = plain(folder, dtype=torch.float32), torch_model.module_of(spec).eval()
    arrays = trainer.snapshot(trainer.tensor_shapes()).arrays()
    mine_.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()}, strict=False)
    adapted = peft.PeftModel.from_pretrained(plain(folder), str(exported(tmp_path, trainer, spec, "peft")))
    merged = plain(exported(tmp_path, trainer, spec, "huggingface"))
    with torch.no_grad():
        expected = mine_(tokens).logits
        assert not torch.allclose(base(tokens).logits, expected, atol=1e-3)
        for other in (adapted, merged):
            assert torch.allclose(other(tokens).logits, expected, atol=1e-5)
        assert torch.equal(base.lm_head.weight, mine_.lm_head.weight)


def test_torch_and_jax_learn_the_same_adapters(tmp_path: Path) -> None:
    """From the same adapters and the same text, four steps end at the same loss."""
    folder, inner = llama(tmp_path / "llama"), {"warmup_steps": 0, "clip_norm": None, "weight_decay": 0.0}
    ours = trainer_of(chat(tmp_path, folder, inner_optimizer=inner, **LORA), 0, 2)
    document = chat(tmp_path, folder, inner_optimizer=inner, **LORA).document
    model = {"initial_weights": str(folder), "compute_dtype": "float32"}
    theirs = trainer_of(IslandSpec.of({**document, "model": model, "trainer": "learners.jax_trainer:create"}), 0, 2)
    begun = theirs.initial_parameters()
    network = decoder_of(json.loads((folder / "config.json").read_text()))
    sources = sources_of(network, "llama")
    own = {}
    for name, array in begun.items():
        matrix, _, side = name.rpartition(".lora_")
        for index, module in sources[matrix].names.items():
            own[f"{module.removesuffix('.weight')}.lora_{side.upper()}.default.weight"] = array[index].T.copy()
    assert own.keys() == ours.tensor_shapes().keys()
    ours.load(own)
    theirs.load(begun)
    for step in range(4):
        assert ours.step(step).loss == pytest.approx(theirs.step(step).loss, rel=1e-4)


def test_chosen_tensors_are_trained_and_the_others_stay(mine: ModuleType) -> None:
    trainer = trained(own(trainable={"only": ["head.*"]}))
    assert list(trainer.tensor_shapes()) == ["head.weight"]
    with pytest.raises(InvalidJobSpec) as refused:
        trainer_of(own(trainable={"only": ["tail.*"]}), 0, 1)
    (problem,) = refused.value.problems
    assert (problem.path, "no tensor's name matches" in problem.message) == ("trainable.only.0", True)


@pytest.mark.parametrize(
    ("lora", "path"),
    [({"rank": 33}, "trainable.lora.rank"), ({"targets": ["q_proj", "lm_head"]}, "trainable.lora.targets.0")],
)
def test_adapters_that_the_model_cannot_have_are_refused(tmp_path: Path, lora: dict[str, Any], path: str) -> None:
    spec = spec_of(saved(tmp_path / "gpt2"), trainable={"lora": lora})
    with pytest.raises(InvalidJobSpec) as refused:
        trainer_of(spec, 0, 1)
    assert refused.value.problems[0].path == path


def test_frozen_matrices_are_held_in_the_type_of_computation_with_the_same_logits(tmp_path: Path) -> None:
    spec = chat(tmp_path, llama(tmp_path / "llama"), model={"compute_dtype": "bfloat16"}, **LORA)
    before, *_, after = losses(trainer_of(spec, 0, 1))
    assert after < before
    module, tokens = torch_model.module_of(spec), torch.arange(12)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = module(tokens).logits
        torch_model.hold_frozen_in(module, torch.bfloat16)
        assert torch.equal(module(tokens).logits, whole)
    frozen = {each.weight.dtype for name, each in module.named_modules() if name.endswith("base_layer")}
    assert frozen == {torch.bfloat16}
    assert {each.dtype for each in torch_model.trained_parameters(module).values()} == {torch.float32}


def test_a_frozen_base_in_4_bits_is_a_quarter_of_the_memory_and_learns_nearly_the_same(tmp_path: Path) -> None:
    """QLoRA: the same on every node, frozen, near to the model in float32, and exported on top of it."""
    pytest.importorskip("bitsandbytes")
    folder = llama(tmp_path / "llama")
    spec = chat(tmp_path, folder, trainable=LORA["trainable"] | {"base": "nf4"})
    one, other, whole = (trainer_of(each, 0, 1) for each in (spec, spec, chat(tmp_path, folder, **LORA)))
    measured = losses(one)
    assert measured == losses(other)
    assert measured[0] != pytest.approx(losses(whole)[0], rel=1e-6)
    assert measured[-1] == pytest.approx(losses(whole)[-1], rel=0.05)
    assert one.tensor_shapes() == whole.tensor_shapes()
    frozen = {name: each for name, each in torch_model.module_of(spec).named_parameters() if "base_layer" in name}
    assert {each.dtype for each in frozen.values()} == {torch.uint8}
    with pytest.raises(
        ConfigurationError, match=r"^trainable.base is nf4, but the model has no layers of torch.nn.Linear"
    ):
        trainer_of(spec_of(saved(tmp_path / "gpt2"), trainable=LORA["trainable"] | {"base": "nf4"}), 0, 1)
    exported(tmp_path, one, spec, "huggingface")


def test_an_island_with_other_weights_than_the_submission_had_does_not_start(tmp_path: Path) -> None:
    folder = saved(tmp_path / "gpt2")
    job = with_weights_digest(spec_of(folder, **LORA).job, EVERYTHING)
    assert job.model.weights_digest is not None
    document = {**job.island_document(job.islands[0]), "roots": EVERYTHING}
    trainer_of(IslandSpec.of(document), 0, 1)
    torch.manual_seed(4)
    transformers.AutoModelForCausalLM.from_config(CONFIGS["gpt2"]()).save_pretrained(folder)
    with pytest.raises(ConfigurationError, match=r"^trainer.model .* but .* where the job was submitted\. Copy"):
        trainer_of(IslandSpec.of(document), 0, 1)
