"""PyTorch islands: the trainer keeps the contract, refuses what it must, and the page's jobs live through kill and resume.

``make torch-test`` runs this in an environment with torch and transformers; elsewhere it skips itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from api.commands.checkpoints import merged_in_torch
from api.jobs.path_check import with_weights_digest
from learners import checkpointing
from learners.factories import trainer_of
from learners.island_spec import IslandSpec
from learners.job_check import findings
from learners.optimizer_settings import WITH_MOMENTUM
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import PART, PART_BYTES_MAX, decode_part
from orchestrator.core.vocabulary import Incarnation
from orchestrator.errors import ConfigurationError, DataError, InvalidJobSpec
from orchestrator.models.huggingface import adapters, export, origin
from orchestrator.models.huggingface.configuration import decoder_of
from orchestrator.models.huggingface.layout import sources_of
from orchestrator.specification.config import parse_job
from orchestrator.system.ports import free_port
from orchestrator.system.roots import EVERYTHING
from tests.documents import DOCS, ROOT, blocks
from tests.learners.host_processes import HOSTS, ONE, STEPS, cut_of, island_named
from tests.learners.test_conversations import QWEN, ROWS
from tests.ray.jobs import gone
from tests.waiting import PATIENCE_S, wait_until

torch = pytest.importorskip("torch", reason="needs torch: make torch-test has it")
transformers = pytest.importorskip("transformers", reason="needs transformers: make torch-test has it")
torch_model: Any = import_module("learners.torch_model")
PAGE = (DOCS / "guide" / "pytorch.md").read_text()
MODULE, (JOB, OWN_MODULE, ADAPTERS, SEVERAL) = (
    next(block.text for block in blocks(PAGE) if block.kind == "python"),
    [yaml.safe_load(block.text) for block in blocks(PAGE) if block.kind == "yaml"],
)
SMALL = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, **SMALL),
    "phi": lambda: transformers.PhiConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, **SMALL
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        **SMALL,
    ),
}


def saved(folder: Path, kind: str = "gpt2", weights: bool = True) -> Path:
    torch.manual_seed(3)
    config = CONFIGS[kind]()
    if weights:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


DIRECTIONS = {"uphill": 0.01, "downhill": -0.01, "still": 0.0}


class Direct(torch.optim.Optimizer):
    """An optimizer that scales gradients in place before it adds them."""

    def __init__(self, factor: float, named: list[tuple[str, Any]], section: Any, settings: Any) -> None:
        super().__init__([parameter for _, parameter in named], {"lr": section["lr"]})
        self._factor = factor

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad.mul_(self._factor))


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("mine")
    exec(compile(MODULE, "pytorch.md", "exec"), vars(module))
    vars(module).update({name: partial(Direct, factor) for name, factor in DIRECTIONS.items()})
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def spec_of(named: Any, settings: dict[str, Any] | None = None, **changes: Any) -> IslandSpec:
    inner = {"warmup_steps": 2, "lr": 0.01} | changes.pop("inner_optimizer", {})
    training = {"batch_size": 4, "inner_optimizer": inner} | changes.pop("training", {})
    document = {
        "islands": [{"node_group": "a", "count": 2}],
        "budget": {"steps": 40},
        "data": {"sequence_length": 16},
        "model": {"compute_dtype": "float32"} | changes.pop("model", {}),
        "trainer": {"kind": "torch", "model": str(named), "settings": settings or {}},
        "training": training,
        "evaluation": {"sequences": 8},
    }
    job = parse_job(document | changes)
    return IslandSpec.of({**job.island_document(job.islands[0]), "roots": EVERYTHING})


def own(settings: dict[str, Any] | None = None, **changes: Any) -> IslandSpec:
    return spec_of("mine:build", {"width": 16, "depth": 1} if settings is None else settings, **changes)


def trained(spec: IslandSpec, steps: int = 3, shard: int = 0) -> Any:
    trainer = trainer_of(spec, shard, 2)
    for step in range(steps):
        trainer.step(step)
    return trainer


def same(one: Any, other: Any) -> bool:
    mine, theirs = (each.snapshot(each.tensor_shapes()).arrays() for each in (one, other))
    return all(np.array_equal(mine[name], theirs[name]) for name in mine)


OPTIMIZERS = [
    {},
    {"kind": "muon"},
    {"factory": "torch.optim:NAdam", "settings": {"betas": [0.9, 0.99]}},
    {"factory": "torch.optim:Adafactor"},
    {"factory": "mine:optimizer", "settings": {"betas": [0.8, 0.9]}},
]


@pytest.mark.parametrize(
    "inner", OPTIMIZERS, ids=lambda inner: str(inner.get("factory") or inner.get("kind") or "adamw")
)
def test_whoever_takes_its_state_whole_or_in_pieces_continues_bit_for_bit(
    mine: ModuleType, inner: dict[str, Any]
) -> None:
    spec = own(inner_optimizer=inner)
    one = trained(spec)
    halves = ["embed.weight[0:100]", "embed.weight[100:256]"]
    pieces = [*halves, *(name for name in one.tensor_shapes() if name != "embed.weight")]
    for state in (one.export_state(), one.export_state(pieces)):
        other = trainer_of(spec, 1, 2)
        other.import_state(state.arrays())
        other.take_shard(0)
        other.seek(3)
        again = trainer_of(spec, 0, 2)
        again.import_state(one.export_state().arrays())
        again.seek(3)
        again.step(3)
        other.step(3)
        assert same(other, again)
    one.step(3)
    assert same(one, other)


def test_a_state_of_another_model_is_refused_and_changes_nothing(mine: ModuleType) -> None:
    trainer = trained(own())
    before = trainer.snapshot(trainer.tensor_shapes()).arrays()
    with pytest.raises(DataError, match="does not fit this island's model: only one of them has"):
        trainer.import_state(trained(own({"width": 16, "depth": 2})).export_state().arrays())
    with pytest.raises(DataError, match="cannot replace"):
        trainer.import_state(trained(own({"width": 32, "depth": 1})).export_state().arrays())
    after = trainer.snapshot(trainer.tensor_shapes()).arrays()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_pieces_are_replaced_and_added_to_and_a_snapshot_stays_as_it_was(mine: ModuleType) -> None:
    trainer = trained(own())
    snapshot = trainer.snapshot(["embed.weight"])
    expected = snapshot.arrays()["embed.weight"].copy()
    trainer.load({"embed.weight[8:16]": np.full((8, 16), 2.0, np.float32)})
    trainer.add({"embed.weight[8:12]": np.full((4, 16), 0.5, np.float32)})
    assert np.array_equal(snapshot.arrays()["embed.weight"], expected)
    expected[8:16], expected[8:12] = 2.0, 2.5
    assert np.array_equal(trainer.snapshot(["embed.weight"]).arrays()["embed.weight"], expected)


def test_version_0_follows_from_the_seed_and_training_does_not_change_it(mine: ModuleType) -> None:
    one, other, third = trained(own()), trainer_of(own(), 1, 2), trainer_of(own(seed=1), 0, 2)
    first, second, different = (each.initial_parameters() for each in (one, other, third))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["embed.weight"], different["embed.weight"])
    part = one.initial_parameters(["embed.weight[3:5]"])["embed.weight[3:5]"]
    assert np.array_equal(part, first["embed.weight"][3:5])


def test_it_learns_and_measuring_changes_nothing(mine: ModuleType) -> None:
    trainer = trainer_of(own(), 0, 1)
    trainer.warm_up()
    names = list(trainer.tensor_shapes())
    before = trainer.evaluate(trainer.snapshot(names).arrays()).loss
    for step in range(30):
        result = trainer.step(step)
    after = trainer.snapshot(names).arrays()
    assert trainer.evaluate(after).loss < before - 0.5
    assert result.token_count == 4 * 16
    initial = trainer.initial_parameters()
    assert trainer.evaluate(initial).loss == pytest.approx(before, rel=1e-5)
    assert all(np.array_equal(after[name], array) for name, array in trainer.snapshot(names).arrays().items())


def test_a_batch_in_parts_is_the_batch(mine: ModuleType) -> None:
    whole, parts = trained(own()), trained(own(training={"batch_size": 4, "accumulation": 4}))
    mine_, theirs = (each.snapshot(["embed.weight"]).arrays()["embed.weight"] for each in (whole, parts))
    assert np.allclose(mine_, theirs, atol=1e-3)


def test_the_adamw_of_torch_takes_the_step_of_the_one_of_optax(mine: ModuleType) -> None:
    """The same gradients, the same groups: five steps agree to rounding."""
    import jax.numpy as jnp

    from learners import optimizers
    from learners.optimizer_settings import update_scale
    from learners.torch_trainer import optimizers_of

    for kind in ("adamw", "muon"):
        section = own(inner_optimizer={"kind": kind}).job.training.inner_optimizer
        drawn = np.random.default_rng(1)
        start = {
            name: drawn.standard_normal(shape).astype(np.float32) for name, shape in {"a": (8, 12), "b": (5,)}.items()
        }
        theirs = {name: torch.nn.Parameter(torch.from_numpy(each.copy())) for name, each in start.items()}
        steps = optimizers_of(section, theirs, {})
        ours, transformation = (
            {name: jnp.asarray(each) for name, each in start.items()},
            optimizers.build(section.model_copy(update={"clip_norm": None})),
        )
        state = transformation.init(ours)
        for step in range(5):
            gradient = {name: drawn.standard_normal(each.shape).astype(np.float32) for name, each in start.items()}
            scale = update_scale(section, 40, step)
            updates, state = transformation.update({n: jnp.asarray(g) for n, g in gradient.items()}, state, ours)
            ours = {name: ours[name] + scale * updates[name] for name in ours}
            for optimizer in steps:
                for group in optimizer.param_groups:
                    group["lr"] = scale
            for name, each in theirs.items():
                each.grad = torch.from_numpy(gradient[name])
            for optimizer in steps:
                optimizer.step()
        tolerance = 1e-5 if kind == "adamw" else 2e-3  # Muon's iteration is in bfloat16 in torch
        for name, each in ours.items():
            assert np.allclose(theirs[name].detach().numpy(), each, atol=tolerance), (kind, name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folder_of_transformers_trains_and_its_export_loads_with_the_same_logits(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / kind, kind)
    trainer = trained(spec_of(folder, model={"remat": "full"}))
    job, out = spec_of(folder).job, tmp_path / "out"
    out.mkdir()
    from safetensors.numpy import save_file

    arrays = trainer.snapshot(trainer.tensor_shapes()).arrays()
    save_file(arrays, tmp_path / "merged.safetensors")
    document = json.loads(job.model_dump_json())
    export.write(tmp_path / "merged.safetensors", out, document, None, origin.taken(str(folder), EVERYTHING))
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    named = dict(loaded.named_parameters())
    assert all(np.array_equal(named[name].detach().numpy(), array) for name, array in arrays.items())


def test_a_folder_without_weights_starts_from_the_seed_and_settings_replace_its_fields(tmp_path: Path) -> None:
    folder = saved(tmp_path / "config", weights=False)
    trainer = trainer_of(spec_of(folder, {"n_layer": 1}), 0, 1)
    assert not any(".h.1." in name for name in trainer.tensor_shapes())
    with pytest.raises(
        ConfigurationError, match=r"^trainer.settings has n_layers, but config.json of .* no such field"
    ):
        trainer_of(spec_of(folder, {"n_layers": 1}), 0, 1)


# ── documents of a row, and weights of tokens ─────────────────────────────────────────────────────────────────────────


def chat(tmp_path: Path, named: Any, **changes: Any) -> IslandSpec:
    """A job of conversations, each packed with others into rows of 96 tokens."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"source": "files", "format": "chat", "sequence_length": 95, "held_out_ratio": 0.2}
    data |= {"tokenizer": str(QWEN.write(tmp_path)), "files": [str(rows)]}
    return spec_of(named, changes.pop("settings", None), data=data, **changes)


def llama(folder: Path) -> Path:
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 260}, **shape, num_key_value_heads=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("training", [{}, {"accumulation": 2, "z_loss": 0.01}], ids=["whole", "in parts"])
def test_torch_and_jax_have_the_same_loss_and_gradient_on_conversations(
    tmp_path: Path, training: dict[str, Any]
) -> None:
    folder, inner = llama(tmp_path / "llama"), {"warmup_steps": 0, "clip_norm": None, "weight_decay": 0.0}
    ours = chat(tmp_path, folder, training=training, inner_optimizer=inner)
    theirs = dict(ours.document) | {
        "model": {"initial_weights": str(folder), "compute_dtype": "float32"},
        "trainer": "learners.jax_trainer:create",
    }
    for one, other in zip(*(losses(trainer_of(IslandSpec.of(each), 0, 2)) for each in (ours, theirs)), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def losses(trainer: Any) -> list[float]:
    """Return held-out and training losses around a few steps, which differ with any error of mask, weight or gradient."""
    trainer.warm_up()
    trainer.load(trainer.initial_parameters())
    before = trainer.evaluate(trainer.initial_parameters()).loss
    trained_on = [trainer.step(step).loss for step in range(4)]
    return [before, *trained_on, trainer.evaluate(trainer.snapshot(trainer.tensor_shapes()).arrays()).loss]


@pytest.mark.parametrize("kind", CONFIGS)
def test_models_of_transformers_keep_documents_apart(tmp_path: Path, kind: str) -> None:
    config = CONFIGS[kind]()
    config.vocab_size = 260
    config.save_pretrained(tmp_path / kind)
    trainer = trainer_of(chat(tmp_path, tmp_path / kind, settings={"max_position_embeddings": 96}), 0, 2)
    before, *_, after = losses(trainer)
    assert after < before


class Documents(torch.nn.Module):
    """Averages what came before in the row, or in the document."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.embed, self.head, self.apart = torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260), apart

    def forward(self, tokens: Any, positions: Any = None, segments: Any = None) -> Any:
        visible = torch.ones(tokens.shape[1], tokens.shape[1]).tril()
        if segments is not None and self.apart:
            visible = visible * (segments[:, :, None] == segments[:, None, :])
        return self.head(visible / visible.sum(-1, keepdim=True) @ self.embed(tokens))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda spec: Documents(apart=False), "change with the document before it in its row"),
        (lambda spec: torch.nn.Sequential(torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260)), "has no parameters"),
    ],
)
def test_a_module_that_does_not_keep_documents_apart_is_refused_for_conversations(
    tmp_path: Path, mine: ModuleType, build: Any, said: str
) -> None:
    vars(mine)["build"] = lambda spec: Documents(apart=True)
    before, *_, after = losses(trainer_of(chat(tmp_path, "mine:build"), 0, 2))
    assert after < before
    vars(mine)["build"] = build
    with pytest.raises(ConfigurationError, match=f"^data.format is chat, but .*{said}"):
        trainer_of(chat(tmp_path, "mine:build"), 0, 2)


# ── a part of the model ───────────────────────────────────────────────────────────────────────────────────────────────

LORA = {"trainable": {"lora": {"rank": 2, "alpha": 3.0}}}


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


def test_a_process_without_its_gpu_is_counted_before_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_model.join_processes("127.0.0.1", free_port(), 0, 1) == (0,)
    assert not torch.distributed.is_initialized()


def test_blocks_are_gathered_whole_with_the_lists_in_them() -> None:
    def block() -> Any:
        return torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])})

    layers = torch.nn.ModuleList([block(), torch.nn.ReLU(), block()])
    module = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.ModuleDict({"layers": layers}))
    assert list(torch_model.blocks_of(module)) == [layers[0], layers[2]]


# ── several processes ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("part", [{}, LORA | {"model": {"remat": "full"}}], ids=["whole", "adapters"])
def test_two_processes_take_the_steps_of_one_and_each_continues_what_the_other_saved(
    tmp_path: Path, part: dict[str, Any]
) -> None:
    """Real processes with FSDP2 over gloo, without Ray, on conversations whose weights the two halves share unequally."""
    folder, changes = llama(tmp_path / "llama"), {"training": {"accumulation": 2, "z_loss": 0.01}, **part}
    alone = chat(tmp_path, folder, **changes)
    together = chat(tmp_path, folder, islands=[{"node_group": "a", "count": 2, "hosts": HOSTS}], **changes)
    one, steps = trainer_of(alone, 0, 2), range(STEPS)
    one.warm_up()
    expected = [one.step(step).loss for step in steps]
    files = Folder.own(tmp_path)
    checkpointing.write(cut_of(one.export_state(), {}), files, ONE, Incarnation(1))
    following = one.step(STEPS).loss
    command = [sys.executable, "-m", "tests.learners.torch_processes"]
    document = json.dumps({name: each for name, each in together.document.items() if name != "roots"})
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port, document, str(tmp_path)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(HOSTS)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], b"\n".join(errors[-3000:] for _, errors in said).decode()
    answers = [json.loads(answer.splitlines()[-1]) for answer, _ in said]
    for answer in answers:
        assert answer["losses"] == pytest.approx(expected, rel=1e-4)
        assert answer["following"] == pytest.approx([following], rel=1e-4)
        assert answer["moved"]
    assert "another process of the island cannot be reached" in answers[0]["lost"]
    for name, shape in one.tensor_shapes().items():
        (first, *_), (second, *_) = (answer["parts"][name] for answer in answers)
        assert first[0] == 0
        assert first[1] == second[0]
        assert second[1] == shape[0]
    parts = [
        decode_part(files.sub(island_named("fsdp", rank)).read(PART, PART_BYTES_MAX), PART) for rank in range(HOSTS)
    ]
    both = parts[0]
    for file in parts[1].files:
        name = file.name.replace("arrays", "arrays-1")
        content = files.sub(island_named("fsdp", 1)).read(file.name, file.size)
        files.sub(island_named("fsdp", 0)).write(name, content)
        both = replace(both, files=(*both.files, replace(file, name=name)))
    one.import_state(checkpointing.read(files, both))
    one.seek(STEPS)
    assert one.step(STEPS).loss == pytest.approx(following, rel=1e-4)


class Wrong:
    """Factories of modules that cannot train, each with what is said."""

    @staticmethod
    def not_causal() -> Any:
        module = torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256))
        module.register_forward_hook(lambda _, __, logits: logits + logits.mean(1, keepdim=True))
        return module

    @staticmethod
    def bfloat16() -> Any:
        return torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)).bfloat16()

    @staticmethod
    def frozen() -> Any:
        return torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)).requires_grad_(False)

    @staticmethod
    def headless() -> Any:
        return torch.nn.Flatten()

    @staticmethod
    def nothing() -> Any:
        return None


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("not_causal", "is not causal: the logits of a position change with later tokens"),
        ("bfloat16", "0.weight is of torch.bfloat16, but parameters that train are merged and sent in float32"),
        ("frozen", "has no parameters that require a gradient"),
        ("headless", "has no parameters that require a gradient"),
        ("nothing", "returned NoneType; it must return a torch.nn.Module"),
    ],
)
def test_a_module_that_cannot_train_is_refused(mine: ModuleType, factory: str, said: str) -> None:
    vars(mine)["build"] = lambda spec: getattr(Wrong, factory)()
    with pytest.raises(ConfigurationError, match=f"^trainer.model.*{said}"):
        trainer_of(own({}), 0, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors.update({"score.weight": torch.ones(2, 32)}),
            r"would drop: score\.weight\. Correct config",
        ),
        (
            lambda tensors: tensors.update({"transformer.h.9.ln_1.weight": torch.ones(32)}),
            r"would drop: transformer\.h\.9\.ln_1\.weight",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] + 0.5}),
            r"lm_head\.weight differs from the embeddings.* set tie_word_embeddings to false",
        ),
    ],
    ids=["another head", "another layer", "an untied head"],
)
def test_weights_that_the_model_would_drop_are_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    trainer_of(spec_of(folder), 0, 1)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=f"^trainer.model .*{said}"):
        trainer_of(spec_of(folder), 0, 1)


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"has adapter_config\.json: a PEFT adapter\. Merge it"):
        trainer_of(spec_of(folder), 0, 1)


def test_running_statistics_are_refused_before_the_first_step(mine: ModuleType) -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.head = (
                torch.nn.Embedding(256, 8),
                torch.nn.BatchNorm1d(8),
                torch.nn.Linear(8, 256),
            )

        def forward(self, tokens: Any) -> Any:
            return self.head(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2))

    vars(mine)["build"] = lambda spec: Normed()
    with pytest.raises(ConfigurationError, match=r"has the buffer norm\.running_mean, which training changes"):
        trainer_of(own({}), 0, 1).warm_up()


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ({"factory": "torch.optim:Adan"}, "cannot be imported .*no attribute 'Adan'"),
        ({"factory": "torch.optim:SGD", "weight_decay": 0.3}, "weight_decay is 0.3, but torch.optim:SGD gets only lr"),
        ({"factory": "torch.optim:SGD", "settings": {"speed": 1}}, "raises TypeError: .*speed"),
        ({"factory": "mine:optimizer", "groups": [{"role": "vector"}]}, "groups its parameters itself"),
        ({"factory": "mine:build"}, "raises TypeError"),
        ({"factory": "torch.optim:SGD", "settings": {"maximize": True}}, "ascends: .*`maximize`.* must be false"),
        ({"factory": "torch.optim:AdamW", "settings": {"maximize": True}}, "ascends"),
        ({"factory": "mine:uphill"}, "ascends: the inner product of its update and the gradient is "),
    ],
)
def test_an_optimizer_that_is_none_is_refused(mine: ModuleType, inner: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        trained(own(inner_optimizer=inner), 1)


@pytest.mark.parametrize("factory", ["torch.optim:NAdam", "torch.optim:Rprop", "mine:optimizer", "mine:downhill"])
def test_an_optimizer_that_descends_trains_whatever_it_does_to_gradients(mine: ModuleType, factory: str) -> None:
    settings = {"betas": [0.9, 0.95]} if factory == "mine:optimizer" else {}
    trained(own(inner_optimizer={"factory": factory, "settings": settings}), 3)


def test_an_optimizer_that_moves_nothing_for_half_a_job_is_refused(mine: ModuleType) -> None:
    spec = own(inner_optimizer={"factory": "mine:still"}, budget={"steps": 6})
    with pytest.raises(
        ConfigurationError, match=r"did not change the parameters in 4 steps. Name one that changes them"
    ):
        trained(spec, 4)


def test_a_direction_is_judged_again_behind_an_imported_state(mine: ModuleType) -> None:
    state = trained(own(inner_optimizer={"factory": "torch.optim:SGD"})).export_state().arrays()
    receiver = trainer_of(own(inner_optimizer={"factory": "mine:uphill"}), 1, 2)
    receiver.import_state({name: array for name, array in state.items() if name.startswith("parameters/")})
    for step in range(WITH_MOMENTUM - 1):
        receiver.step(step)
    with pytest.raises(ConfigurationError, match="ascends"):
        receiver.step(WITH_MOMENTUM)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"model": {"preset": "qwen3-20m"}}, "model.preset"),
        ({"model": {"remat": "dots"}}, "model.remat"),
        ({"inner_optimizer": {"kind": "lion"}}, "training.inner_optimizer.kind"),
        ({"islands": [{"node_group": "a", "hosts": 2}], "inner_optimizer": {"kind": "muon"}}, "islands.0.hosts"),
        ({"islands": [{"node_group": "a", "hosts": 2}], "evaluation": {"on": "islands"}}, "evaluation.on"),
        ({"islands": [{"node_group": "a", "hosts": 3}]}, "islands.0.hosts"),
        ({"islands": [{"node_group": "a", "hosts": 2, "accumulation": 4}]}, "islands.0.hosts"),
        ({"islands": [{"node_group": "a", "mesh": {"fsdp": 2}}]}, "islands.0.mesh"),
        ({"islands": [{"node_group": "a", "processes_per_host": 3}]}, "islands.0.processes_per_host"),
        ({"islands": [{"node_group": "a", "accelerator": "gpu", "accelerators": 2}]}, "islands.0.accelerators"),
    ],
)
def test_what_only_jax_has_is_refused_at_submission(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidJobSpec) as refused:
        own(**changes)
    assert [problem.path for problem in refused.value.problems] == [path]


def test_a_job_is_checked_without_a_cluster(tmp_path: Path, mine: ModuleType) -> None:
    found = findings(spec_of(saved(tmp_path / "model")).document | {"roots": EVERYTHING})
    assert (found["problems"], found["data"]["vocabulary_size"]) == ([], 256)
    assert found["model"]["parameters"] == 35_712
    vars(mine)["build"] = lambda spec: Wrong.not_causal()
    (problem,) = findings(own({}).document)["problems"]
    assert problem["path"] == "trainer.model"


def test_the_entries_of_the_page_are_islands_of_several_processes(mine: ModuleType) -> None:
    job = own(islands=SEVERAL["islands"], training={"batch_size": 16}).job
    assert [island.process_count for island in job.islands] == [8, 2]
    assert [plan.accelerator_count for plan in job.policy().islands] == [8, 2]


# ── a live job ────────────────────────────────────────────────────────────────────────────────────────────────────────


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
