"""Public recipes of other frameworks become jobs, and a job's inner steps are those that plain optax would take.

The ten recipes have the settings that were published, in files of our own. Those of frameworks that `atoll import` does not
read (Psyche, Marin, pcp, WA-DiLoCo) are written in the form of one that it reads.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

from api.cli import app
from learners import model
from learners.island_spec import IslandSpec
from learners.jax_trainer import JaxTrainer
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.specification import recipes
from orchestrator.specification.config import parse_job

MAXTEXT_8B = """\
#!/bin/bash
# two slices
NUM_FRAGMENTS="${NUM_FRAGMENTS:-37}"
OUTER_LR=0.1
echo "python3 -m maxtext.trainers.pre_train.train steps=5"
python3 -m maxtext.trainers.pre_train.train maxtext/configs/base.yml run_name=one model_name=qwen3-8b \\
  per_device_batch_size=8 max_target_length=2048 enable_diloco=true enable_streaming_diloco=true \\
  dcn_diloco_parallelism=2 diloco_sync_period=${NUM_FRAGMENTS} num_diloco_fragments=$NUM_FRAGMENTS \\
  diloco_outer_lr=${OUTER_LR} diloco_outer_momentum=0.9 num_communication_overlapping_steps=2 steps=1000 \\
  weight_dtype=bfloat16 dataset_name='c4/en:3.0.1'   # TFDS
"""
MAXTEXT_MOE = """\
model_name: qwen3-30b-a3b
per_device_batch_size: 2
max_target_length: 8192
steps: 47573
enable_diloco: true
dcn_diloco_parallelism: 2
diloco_sync_period: 49
num_diloco_fragments: 49
adam_weight_decay: 0.1
z_loss_multiplier: 1.0e-5
load_balance_loss_weight: 0.001
dataset_type: olmo_npy
remat_policy: full
"""
TORCHTITAN = """\
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "debugmodel"
[optimizer]
lr = 8e-4
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
[training]
local_batch_size = 8
seq_len = 2048
steps = 10
dataset = "c4_test"
[fault_tolerance]
enable = true
group_size = 2
semi_sync_method = "diloco"
sync_steps = 10
num_fragments = 2
"""
MULOCO = """\
[model]
flavor = "llama3-w1024-d12-h16"
[optimizer]
name = "Muon"
lr = 0.0224
beta2 = 0.99
weight_decay = 1e-4
[lr_scheduler]
warmup_steps = 1000
decay_type = "cosine"
lr_min = 0.1
[training]
local_batch_size = 64
global_batch_size = 512
seq_len = 2048
steps = 7780
[fault_tolerance]
group_size = 8
semi_sync_method = "diloco"
sync_steps = 30
num_fragments = 3
quantize_bits = 2
"""
OPENDILOCO = """\
export PEER=/ip4/10.0.0.1/tcp/30001
./run_training.sh 8 1 $PEER \\
    --sharding-strategy NO_SHARD --per-device-train-batch-size 8 --precision bf16-mixed --total-batch-size 512 \\
    --hv.local-steps 500 --hv.galaxy-size 8 --total-steps 88_000 --project one --hv.skip_load_from_peers --lr 4e-4 \\
    --path-model PrimeIntellect/llama-150m-fresh --log-activations-steps 250 --ckpt.path 150_ckpt
"""
PSYCHE = """\
model_name: deepseek-40b
base_emb_dim: 8192
base_num_decoder_layers: 40
per_device_batch_size: 8
max_target_length: 2048
steps: 200000
opt_type: distro
batch_ramp_tokens: 540000000000
"""
YETO = """\
name: one
run: |
  set -e
  yeto launch --gpu aws:8xa100@us-east-2,runpod:8xh100@CA,gcp:4xl4 --model qwen35-9b --data org/chat-traces \\
    --lora-r 16 --lora-alpha 32 --inner-lr 0.0002 --outer-lr 0.28 --outer-optimizer sgd --seq-len 1024 \\
    --micro-batch-size 4 --token-budget 700000 --budget 40
"""
MARIN = """\
base_emb_dim: 1024
base_num_decoder_layers: 12
base_num_query_heads: 8
base_num_kv_heads: 8
base_mlp_dim: 4096
vocab_size: 128256
per_device_batch_size: 8
max_target_length: 4096
steps: 8000
learning_rate: 3.0e-3
enable_diloco: true
dcn_diloco_parallelism: 4
diloco_sync_period: 100
outer_optimizer: adam
staleness_max: 2
"""
WA_DILOCO = """\
model_name: default
base_emb_dim: 576
base_num_decoder_layers: 30
base_num_query_heads: 9
base_num_kv_heads: 3
head_dim: 64
base_mlp_dim: 1536
vocab_size: 49152
logits_via_embedding: true
per_device_batch_size: 8
max_target_length: 2048
steps: 20000
enable_diloco: true
dcn_diloco_parallelism: 8
diloco_sync_period: 128
diloco_sync_period_max: 512
hf_path: HuggingFaceFW/fineweb-edu
"""
PCP = """\
name_model = "150M"
type_model = "llama2"
[train]
micro_bs = 16
[optim]
batch_size = 256
warmup_steps = 100
total_steps = 21400
sched_type = "wsd-sqrt"
z_loss = true
[optim.optim]
lr = 4e-4
[data]
dataset_name_or_paths = "/data/train_0.bin"
seq_length = 2048
[diloco]
inner_steps = 50
compression = "uint8"
"""
RECIPES = {
    "1 MaxText Qwen3-8B": ("run.sh", MAXTEXT_8B, {"weight_dtype", "dataset_type"}),
    "2 MaxText Qwen3-30B-A3B": ("moe.yml", MAXTEXT_MOE, {"dataset_type"}),
    "3 torchtitan fault tolerance": ("ft.toml", TORCHTITAN, {"training.dataset"}),
    "4 MuLoCo 2 bit": ("muloco.toml", MULOCO, {"fault_tolerance.quantize_bits", "training.dataset"}),
    "5 OpenDiLoCo 150M": ("run.sh", OPENDILOCO, {"dataset_name_or_path"}),
    "6 Psyche": (
        "psyche.yaml",
        PSYCHE,
        {"model_name", "opt_type", "batch_ramp_tokens", "enable_diloco", "dataset_type"},
    ),
    "7 yeto LoRA": ("sky.yaml", YETO, {"model", "gpu", "data"}),
    "8 Marin outer Adam": ("marin.yml", MARIN, {"outer_optimizer", "staleness_max", "dataset_type"}),
    "9 WA-DiLoCo": ("wa.yml", WA_DILOCO, {"diloco_sync_period_max", "dataset_type"}),
    "10 pcp nanochat": ("pcp.toml", PCP, {"optim.sched_type", "islands", "data.dataset_name_or_paths"}),
}
FAST = ("3 torchtitan fault tolerance",)


def imported(name: str) -> recipes.Recipe:
    file, content, _ = RECIPES[name]
    return recipes.read(content.encode(), file)


@pytest.mark.parametrize("name", RECIPES)
def test_a_public_recipe_becomes_a_job_and_what_it_lacks_is_listed(name: str) -> None:
    recipe = imported(name)
    parse_job(recipe.document)
    expected = set(RECIPES[name][2])
    if name == "7 yeto LoRA" and "trainable" not in recipe.document:
        expected |= {"lora_r"}
    assert {one.setting for one in recipe.unmatched} - {"lora_alpha"} == expected
    assert all(one.note for one in recipe.unmatched)


def test_the_settings_of_recipes_are_those_of_their_jobs() -> None:
    jobs = {name: parse_job(imported(name).document) for name in RECIPES}
    maxtext = jobs["1 MaxText Qwen3-8B"]
    assert (maxtext.model.preset, maxtext.island_count, maxtext.training.batch_size) == ("qwen3-8b", 2, 8)
    sync = maxtext.synchroniser
    assert (sync.interval_steps, sync.fragments, sync.overlap_steps) == (37, 37, 2)
    assert (sync.outer_optimizer.lr, sync.outer_optimizer.momentum) == (0.1, 0.9)
    assert maxtext.training.inner_optimizer.warmup_steps == 100, "a tenth of 1,000 steps"
    moe = jobs["2 MaxText Qwen3-30B-A3B"]
    assert 29e9 < moe.model.network.parameter_count < 31e9
    assert (moe.training.z_loss, moe.model.remat, moe.data.sequence_length) == (1e-5, "full", 8192)
    muloco = jobs["4 MuLoCo 2 bit"]
    inner = muloco.training.inner_optimizer
    assert (inner.kind, inner.lr, inner.beta2, inner.schedule, inner.lr_final_ratio) == (
        "muon",
        0.0224,
        0.99,
        "cosine",
        0.1,
    )
    assert (muloco.island_count, muloco.training.batch_size, muloco.synchroniser.fragments) == (8, 64, 3)
    open_diloco = jobs["5 OpenDiLoCo 150M"]
    assert (open_diloco.training.batch_size, open_diloco.training.accumulation) == (512, 64)
    assert (open_diloco.synchroniser.interval_steps, open_diloco.budget.steps) == (500, 88_000)
    yeto = jobs["7 yeto LoRA"]
    assert (yeto.island_count, yeto.budget.tokens, yeto.synchroniser.outer_optimizer.kind) == (3, 700_000, "sgd")
    prime = jobs["10 pcp nanochat"]
    assert (prime.synchroniser.wire.up, prime.training.z_loss, prime.model.network.hidden_size) == ("int8", 2e-4, 2_816)


def test_a_mask_between_documents_is_named_as_a_job_has_it() -> None:
    recipe = recipes.read(f"{MAXTEXT_MOE}packing: true\n".encode(), "moe.yml")
    (note,) = [one.note for one in recipe.unmatched if one.setting == "packing"]
    assert note.startswith("Set data.intra_document_masking")


def test_batches_per_device_are_those_of_an_island_of_several() -> None:
    spec = parse_job(recipes.read(MAXTEXT_8B.encode(), "run.sh", devices=4).document)
    assert (spec.training.batch_size, spec.islands[0].accelerators) == (32, 4)
    spec = parse_job(recipes.read(OPENDILOCO.encode(), "run.sh", devices=8).document)
    assert (spec.training.batch_size, spec.training.accumulation) == (512, 8)


# ── inner steps ───────────────────────────────────────────────────────────────────────────────────────────────────────

STEPS, LENGTH, BATCH, VOCABULARY = 50, 16, 4, 64
MATRICES = frozenset({"query", "key", "value", "output", "gate", "up", "down", "router"})


def hundredth(document: dict[str, Any]) -> dict[str, Any]:
    """The job of a recipe at a hundredth of its width, with two layers and small batches, for 50 steps."""
    network = parse_job(document).model.network
    decoder: dict[str, Any] = {"width": 128, "head_count": 4, "hidden_size": 512}
    if hasattr(network, "model_dump"):
        decoder = network.model_dump(mode="json")
    width = max(8, decoder["width"] // 100)
    heads = max(1, min(2, decoder["head_count"]))
    sizes = {"vocabulary_size": VOCABULARY, "width": width, "layer_count": 2, "head_count": heads, "head_size": 8}
    decoder |= {**sizes, "key_value_head_count": 1}
    if decoder.get("experts"):
        decoder["experts"] |= {"count": 4, "active": 2, "hidden_size": 8}
    else:
        decoder["hidden_size"] = max(8, decoder["hidden_size"] // 100)
    inner = document["training"]["inner_optimizer"]
    inner |= {"warmup_steps": min(5, inner.get("warmup_steps", 5))}
    training = document["training"] | {"batch_size": BATCH, "accumulation": 1, "inner_optimizer": inner}
    small = {name: value for name, value in document.items() if name != "trainable"}
    return small | {
        "model": {"decoder": decoder, "compute_dtype": "float32"},
        "training": training,
        "budget": {"steps": STEPS},
        "data": {"sequence_length": LENGTH},
        "islands": [{"node_group": "here"}],
    }


def batch(number: int) -> np.ndarray:
    """Tokens that repeat a pattern, so that there is something to learn."""
    start = np.random.default_rng(number).integers(0, VOCABULARY, (BATCH, 1))
    return ((start + 3 * np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)


def plain_optimizer(spec: Any) -> optax.GradientTransformation:
    """The recipe's optimizer as optax has it, with its own schedules."""
    inner = spec.job.training.inner_optimizer
    peak, warmup, floor = inner.lr, inner.warmup_steps, inner.lr * inner.lr_final_ratio
    falling = {
        "cosine": optax.cosine_decay_schedule(peak, STEPS - warmup, alpha=inner.lr_final_ratio),
        "linear": optax.linear_schedule(peak, floor, STEPS - warmup),
        "wsd": optax.linear_schedule(
            peak, floor, round(inner.decay_ratio * STEPS), STEPS - round(inner.decay_ratio * STEPS) - warmup
        ),
    }[inner.schedule]
    rising = optax.linear_schedule(peak / max(1, warmup), peak * (warmup + 1) / max(1, warmup), max(1, warmup))
    rate = optax.join_schedules([rising, falling], [warmup])

    def decays(tree: Any) -> dict[str, bool]:
        return {name: name.rpartition(".")[2] in MATRICES for name in tree}

    adamw = optax.adamw(rate, b1=inner.beta1, b2=inner.beta2, weight_decay=inner.weight_decay, mask=decays)
    if inner.kind == "muon":
        muon = optax.contrib.muon(
            rate,
            beta=inner.momentum,
            weight_decay=inner.weight_decay,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=lambda tree: jax.tree.map(
                lambda tensor: optax.contrib.MuonDimensionNumbers(tensor.ndim - 2, tensor.ndim - 1), tree
            ),
        )
        labels = lambda tree: {name: "muon" if use else "adamw" for name, use in decays(tree).items()}  # noqa: E731
        adamw = optax.partition({"muon": muon, "adamw": adamw}, labels)
    return optax.chain(optax.clip_by_global_norm(inner.clip_norm), adamw)


def plain_losses(spec: Any, built: model.Model, parameters: dict[str, jax.Array]) -> list[float]:
    """The losses of a loop that a user of optax would write."""
    optimizer = plain_optimizer(spec)
    state = optimizer.init(parameters)

    def objective(parameters: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        if built.objective is not None:  # with the losses of experts and of the logits' scale
            return built.objective(parameters, tokens)
        loss = built.loss(parameters, tokens)
        return loss, loss

    @jax.jit
    def step(parameters: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        (_, loss), gradient = jax.value_and_grad(objective, has_aux=True)(parameters, tokens)
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    losses = []
    for number in range(STEPS):
        parameters, state, loss = step(parameters, state, jnp.asarray(batch(number)))
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.soak("compiles one more model, as the others do"))
        for name in RECIPES
    ],
)
def test_fifty_steps_at_a_hundredth_of_the_width_are_those_of_plain_optax(name: str) -> None:
    document = parse_job(hundredth(imported(name).document)).model_dump(mode="json")
    spec = IslandSpec.of(document)
    built = model.build(spec)
    trainer = JaxTrainer(spec, built, draw=lambda _: batch)
    trainer.warm_up()
    first = trainer.snapshot(trainer.tensor_shapes()).arrays()
    before = {name: jnp.array(value) for name, value in first.items()}
    expected = plain_losses(spec, built, before)
    losses = [trainer.step(number).loss for number in range(STEPS)]
    assert losses == pytest.approx(expected, abs=1e-4)
    # Compare one batch before and after. At the smallest learning rates, two batches differ by more than 50 steps gain.
    last = trainer.snapshot(trainer.tensor_shapes()).arrays()
    after = {name: jnp.asarray(value) for name, value in last.items()}
    assert float(built.loss(after, batch(0))) < float(built.loss(before, batch(0)))


# ── what cannot be read ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("a.toml", "[model\n", r"a\.toml is not valid TOML.*Correct it"),
        ("a.toml", "title = 'a book'\n", r"a\.toml is no configuration of a framework that atoll knows.*--framework"),
        ("a.yml", "- 1\n", r"a\.yml is no mapping of settings"),
        ("a.sh", "ls -l\n", "is no configuration of a framework"),
        ("a.sh", "yeto launch --model 'qwen\n", "cannot be split into words"),
        ("a.toml", "[training]\nseq_len = 'long'\n", r"training\.seq_len is 'long', and not a number"),
        ("a.bin", "\udcff", "is not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(file: str, content: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        recipes.read(content.encode(errors="surrogateescape"), file)


def test_values_that_no_job_can_have_are_refused_with_the_field() -> None:
    with pytest.raises(InvalidJobSpec, match=r"data\.sequence_length"):
        recipes.read(TORCHTITAN.replace("2048", "-1").encode(), "ft.toml")


def test_a_script_is_read_and_never_run(tmp_path) -> None:
    touch = f"touch {tmp_path}/ran"
    script = f"{touch}\nA=$({touch})\nyeto launch --model qwen3-8b --seq-len `{touch}`\n"
    with pytest.raises(ConfigurationError, match="seq_len"):
        recipes.read(script.encode(), "run.sh")
    assert not (tmp_path / "ran").exists()


def test_the_command_writes_a_job_that_can_be_checked_and_lists_the_rest(tmp_path) -> None:
    (tmp_path / "ft.toml").write_text(TORCHTITAN)
    result = CliRunner().invoke(app, ["import", str(tmp_path / "ft.toml"), "-o", str(tmp_path / "job.yaml")])
    assert result.exit_code == 0, result.output
    assert "no equivalent: training.dataset ('c4_test')" in result.output
    assert "left out, without effect on training: job.dump_folder" in result.output
    assert "# From a configuration of torchtitan" in (tmp_path / "job.yaml").read_text()
    from orchestrator.specification.config import read_job_document

    assert parse_job(read_job_document(tmp_path / "job.yaml")).synchroniser.fragments == 2
    printed = CliRunner().invoke(app, ["import", str(tmp_path / "ft.toml"), "--json", "--node-group", "spot"])
    assert json.loads(printed.stdout)["job"]["islands"] == [{"node_group": "spot", "count": 2}]
