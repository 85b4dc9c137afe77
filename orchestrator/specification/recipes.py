"""Reads the training configurations of other frameworks, and says which of their settings a job has no equivalent for.

    torchtitan     TOML, or its command line (--training.steps 100)
    MaxText        YAML, or its command line (name=value)
    OpenDiLoCo     the command line of train_fsdp.py, in a script
    prime          TOML
    yeto           the command line of `yeto launch`, also in a script or in a task of SkyPilot

Every file is first a flat mapping of names to values (``recipe_files``). A function for each framework takes the settings
that it knows. What is left either has no effect on what is trained (``OPERATIONAL``) or is reported as ``Unmatched``. Where
a framework's default differs from a job's, the job states it. Sources: the public repositories of the frameworks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import yaml

from orchestrator.models.decoder import DecoderSection
from orchestrator.models.presets import DECODERS
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.recipe_files import (
    OPERATIONAL,
    Framework,
    refused,
    settings_of,
)
from orchestrator.specification.recipe_files import RECIPE_BYTES_MAX as RECIPE_BYTES_MAX
from orchestrator.system.plain import brief

FRAMEWORKS: tuple[Framework, ...] = ("torchtitan", "maxtext", "opendiloco", "prime", "yeto")


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A setting that the job does not have, with its value, and what that means or what to do."""

    setting: str
    value: Any
    note: str

    def __str__(self) -> str:
        shown = "not set" if self.value is None else brief(self.value)
        return f"{self.setting} ({shown}): {self.note}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A job specification as a document, and the settings of the ``framework`` that are not in it.

    ``operational`` are names of settings without effect on what is trained, such as those of logging.
    """

    framework: Framework
    document: dict[str, Any]
    unmatched: tuple[Unmatched, ...]
    operational: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "framework": self.framework,
            "job": self.document,
            "unmatched": [{"setting": one.setting, "value": one.value, "note": one.note} for one in self.unmatched],
            "operational": list(self.operational),
        }

    def yaml(self) -> str:
        """Return the job as YAML, with the unmatched settings as comments."""
        lines = [f"# From a configuration of {self.framework}. No equivalent:"] if self.unmatched else []
        lines += [f"#   {line}" for one in self.unmatched for line in str(one).splitlines()]
        return "".join(f"{line}\n" for line in lines) + yaml.safe_dump(self.document, sort_keys=False, width=110)


@dataclass(slots=True)
class _Settings:
    """The settings of a configuration by their names, and what was made of them."""

    values: dict[str, Any]
    document: dict[str, Any] = field(default_factory=dict)
    unmatched: list[Unmatched] = field(default_factory=list)
    devices: int = 1

    def take(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these names that is there, and remove all of them."""
        present = [self.values.pop(name) for name in names if name in self.values]
        return present[0] if present else default

    def number(self, *names: str, default: float) -> float:
        """Return a number as ``take``. Raises ConfigurationError for another value."""
        value = self.take(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(f"{names[0]} is {value!r}, and not a number", "Correct it")
        return value

    def count(self, *names: str, default: int) -> int:
        return int(self.number(*names, default=default))

    def put(self, path: str, value: Any) -> None:
        """Set the field of the job at a dotted path."""
        *sections, name = path.split(".")
        place = self.document
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value

    def note(self, setting: str, value: Any, note: str) -> None:
        self.unmatched.append(Unmatched(setting, value, note))

    def note_if(self, *names: str, note: str, unless: tuple[Any, ...] = (None, False, 0, 1, "", "none", "no")) -> None:
        """Report each of these settings that has a value other than these."""
        for name in names:
            if (value := self.take(name)) not in unless:
                self.note(name, value, note)


def read(
    content: bytes, name: str, framework: str | None = None, devices: int = 1, node_group: str = "default"
) -> Recipe:
    """Return the job that a configuration describes, for islands of ``devices`` accelerators in ``node_group``.

    Raises ConfigurationError, with the file's name, if it cannot be read or is of no known framework; InvalidJobSpec for
    values that a job cannot have.
    """
    values, recognised = settings_of(content, name)
    chosen = next((one for one in FRAMEWORKS if one == framework), recognised)
    if chosen is None:
        message = f"{name} is no configuration of a framework that atoll knows ({', '.join(FRAMEWORKS)})"
        raise refused(message, "Name its framework with --framework")
    settings = _Settings(values, devices=max(1, devices))
    try:
        _READERS[chosen](settings)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise refused(f"{name} has a setting that cannot be right: {error}", "Correct it") from error
    settings.document["islands"][0]["node_group"] = node_group
    parse_job(settings.document)
    operational = [key for key in settings.values if any(fnmatchcase(key, one) for one in OPERATIONAL[chosen])]
    for key, value in settings.values.items():
        if key not in operational and value not in (None, "", [], {}):
            is_mask = key.rpartition(".")[2] in MASKS and value in (True, "block_causal")
            settings.note(key, value, MASKED if is_mask else "a job has no such setting")
    return Recipe(chosen, settings.document, tuple(settings.unmatched), tuple(operational))


MASKS = ("packing", "sequence_packing", "attn_mask_type")
MASKED = (
    "Set data.intra_document_masking once data.tokenizer names a tokenizer; bytes have no token that ends a document."
)


# ── what all have ─────────────────────────────────────────────────────────────────────────────────────────────────────

_DATA = "Name its files in data.sources; without these the job trains on the built-in text."
_TOKENIZER = "Copy the tokenizer's file, and name it in data.tokenizer."


def _islands(settings: _Settings, count: int) -> None:
    island: dict[str, Any] = {"node_group": "default", "count": max(1, count)}
    if settings.devices > 1:
        island |= {"accelerator": "gpu", "accelerators": settings.devices}
    settings.put("islands", [island])


def _outer(settings: _Settings, lr: float, momentum: float) -> None:
    outer = {"kind": "nesterov", "lr": float(lr), "momentum": float(momentum)}
    settings.put("synchroniser.outer_optimizer", outer if momentum else {"kind": "sgd", "lr": float(lr)})


def _rounds(settings: _Settings, interval: int, fragments: int = 1, overlap: int = 0) -> None:
    """Set H, P and τ. The other frameworks wait for every island."""
    settings.put("synchroniser.interval_steps", interval)
    settings.put("synchroniser.fragments", fragments)
    settings.put("synchroniser.overlap_steps", overlap)


def _inner(settings: _Settings, **values: Any) -> None:
    for name, value in values.items():
        is_real = isinstance(value, int) and name not in ("warmup_steps",)
        settings.put(f"training.inner_optimizer.{name}", float(value) if is_real else value)


def _batch(settings: _Settings, batch: int, part: int) -> None:
    """Set the batch of an island, in as many parts as its devices take ``part`` sequences each at once."""
    settings.put("training.batch_size", batch)
    at_once = max(1, part * settings.devices)
    if at_once < batch and batch % at_once == 0:
        settings.put("training.accumulation", batch // at_once)


def _llama(
    width: int, layers: int, heads: int, pairs: int | None = None, ratio: float = 1.0, multiple: int = 256, **more: Any
) -> dict[str, Any]:
    """Return a decoder with the sizes of Llama's reference code, whose hidden size is 8/3 · width, rounded up."""
    hidden = int(ratio * int(8 * width / 3))
    sizes = {
        "vocabulary_size": 128_256,
        "width": width,
        "layer_count": layers,
        "head_count": heads,
        "key_value_head_count": pairs or heads,
        "head_size": width // heads,
        "hidden_size": -(-hidden // multiple) * multiple,
    }
    return sizes | {"tied_embeddings": False, "norm_epsilon": 1e-5, "rope_theta": 500_000.0} | more


def _decoder(preset: str) -> dict[str, Any]:
    decoder: DecoderSection = DECODERS[preset]
    return decoder.model_dump(mode="json", exclude_defaults=True)


_QWEN3_30B: dict[str, Any] = {
    "vocabulary_size": 151_936,
    "width": 2_048,
    "layer_count": 48,
    "head_count": 32,
    "key_value_head_count": 4,
    "head_size": 128,
    "experts": {"count": 128, "active": 8, "hidden_size": 768},
    "tied_embeddings": False,
    "query_key_norm": True,
    "rope_theta": 1_000_000.0,
}
_BY_NAME: Mapping[str, str] = {
    **{name: name for name in DECODERS},
    "qwen3-0.6B": "qwen3-0.6b",
    "llama3-1b": "llama3.2-1b",
    "llama32-1b": "llama3.2-1b",
    "llama32-3b": "llama3.2-3b",
    "llama31-8b": "llama3.1-8b",
}


def _model(settings: _Settings, setting: str, name: str) -> None:
    """Set the model that a framework calls by ``name``, or report it."""
    low = name.lower().rpartition("/")[2]
    if low == "qwen3-30b-a3b":
        settings.put("model.decoder", dict(_QWEN3_30B))
    elif (preset := _BY_NAME.get(low)) is not None:
        settings.put("model.preset", preset)
    else:
        remedy = "Describe it in model.decoder, or name a folder with its weights in model.initial_weights."
        settings.note(setting, name, remedy)


def _remat(settings: _Settings, value: Any, setting: str) -> None:
    kinds = {"none": "none", "selective": "dots", "full": "full", "minimal": "dots", False: "none", True: "full"}
    if value in kinds:
        if kinds[value] != "none":
            settings.put("model.remat", kinds[value])
    elif value is not None:
        settings.put("model.remat", "dots")
        settings.note(setting, value, "model.remat is dots instead, which recomputes everything but matrix products.")


# ── the frameworks ────────────────────────────────────────────────────────────────────────────────────────────────────


def _torchtitan(settings: _Settings) -> None:
    take, count, number = settings.take, settings.count, settings.number
    family, flavor = take("model.name", default="llama3"), str(take("model.flavor", default="debugmodel"))
    large = {
        "debugmodel": lambda: _llama(256, 6, 16, vocabulary_size=2_048),
        "8b": lambda: _decoder("llama3.1-8b"),
        "70b": lambda: _llama(8_192, 80, 64, 8, 1.3, 4_096),
        "405b": lambda: _llama(16_384, 126, 128, 8, 1.2, 4_096),
    }
    sizes = re.fullmatch(r"llama3-w(\d+)-d(\d+)-h(\d+)", flavor)
    if family == "llama3" and sizes:
        settings.put("model.decoder", _llama(*map(int, sizes.groups())))
    elif family == "llama3" and flavor.lower() in large:
        settings.put("model.decoder", large[flavor.lower()]())
    else:
        _model(settings, "model.flavor", f"{family}-{flavor}")
    length, steps = count("training.seq_len", default=2_048), count("training.steps", default=10_000)
    groups = max(1, count("fault_tolerance.group_size", default=0))
    groups = max(groups, count("parallelism.data_parallel_replicate_degree", default=1))
    part = count("training.local_batch_size", "training.batch_size", default=8)
    batch = count("training.global_batch_size", default=-1)
    _islands(settings, groups)
    _batch(settings, batch // groups if batch > 0 else part * settings.devices, part)
    settings.put("data.sequence_length", length)
    settings.put("budget.steps", steps)
    settings.put("seed", count("training.seed", "debug.seed", default=0))
    kind = str(take("optimizer.name", default="AdamW"))
    if kind.lower() not in ("adamw", "muon"):
        settings.note(
            "optimizer.name", kind, "The job uses AdamW; another optimizer is a factory (inner_optimizer.factory)."
        )
    decay, shape = take("lr_scheduler.decay_ratio"), str(take("lr_scheduler.decay_type", default="linear"))
    if shape not in ("linear", "cosine") or (decay is not None and shape != "linear"):
        settings.note("lr_scheduler.decay_type", shape, "The rate falls linearly instead.")
    _inner(
        settings,
        kind="muon" if kind.lower() == "muon" else "adamw",
        lr=number("optimizer.lr", default=8e-4),
        beta1=number("optimizer.beta1", default=0.9),
        beta2=number("optimizer.beta2", default=0.95),
        weight_decay=number("optimizer.weight_decay", default=0.1),
        warmup_steps=count("lr_scheduler.warmup_steps", default=200),
        schedule="wsd" if decay is not None else "cosine" if shape == "cosine" else "linear",
        lr_final_ratio=number("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min", default=0.0),
        clip_norm=number("training.max_norm", default=1.0),
    )
    if decay is not None:
        _inner(settings, decay_ratio=decay)
    settings.note_if("optimizer.eps", note="atoll's AdamW has 1e-8.", unless=(None, 1e-8))
    settings.note_if("optimizer.early_step_in_backward", note="a job has no such setting")
    method = take("fault_tolerance.semi_sync_method")
    if method is None or method not in ("diloco", "local_sgd"):
        settings.note("fault_tolerance.semi_sync_method", method, "Islands of a job always merge by DiLoCo.")
    _outer(settings, 1.0, 0.0) if method == "local_sgd" else _outer(settings, 0.7, 0.9)
    fragments, delay = (
        count("fault_tolerance.num_fragments", default=1),
        count("fault_tolerance.fragment_sync_delay", default=0),
    )
    _rounds(settings, count("fault_tolerance.sync_steps", default=5), fragments, delay)
    if alpha := number("fault_tolerance.fragment_update_alpha", default=0.0):
        settings.put("synchroniser.adoption", "mix")
        settings.put("synchroniser.mix_alpha", float(alpha))
    if take("fault_tolerance.should_quantize"):
        settings.put("synchroniser.wire", {"up": "int8", "down": "int8"})
    if (least := count("fault_tolerance.min_replica_size", default=1)) > 1:
        settings.put("synchroniser.quorum", least)
    _remat(settings, take("activation_checkpoint.mode"), "activation_checkpoint.mode")
    shard, tensor = (
        count(f"parallelism.{name}", default=1) for name in ("data_parallel_shard_degree", "tensor_parallel_degree")
    )
    mesh = {name: size for name, size in (("fsdp", shard), ("tensor", tensor)) if size > 1}
    if mesh and settings.devices > 1:
        settings.document["islands"][0]["mesh"] = mesh
    elif mesh:
        settings.note("parallelism", mesh, "Give --devices, and the job has this mesh.")
    settings.note_if(
        "parallelism.pipeline_parallel_degree", "parallelism.context_parallel_degree", note="a mesh has no such axis"
    )
    take("parallelism.enable_async_tensor_parallel"), take("parallelism.fsdp_reshard_after_forward")
    settings.note("training.dataset", take("training.dataset", default="c4_test"), _DATA)
    settings.note_if("training.dataset_path", note=_DATA)
    settings.note_if("model.tokenizer_path", "model.hf_assets_path", note=_TOKENIZER)


def _maxtext(settings: _Settings) -> None:
    take, count, number = settings.take, settings.count, settings.number
    base = {
        "vocabulary_size": ("vocab_size", 32_000),
        "width": ("base_emb_dim", 2_048),
        "layer_count": ("base_num_decoder_layers", 16),
        "head_count": ("base_num_query_heads", 16),
        "key_value_head_count": ("base_num_kv_heads", 16),
        "head_size": ("head_dim", 128),
        "hidden_size": ("base_mlp_dim", 7_168),
    }
    stated = {name: take(theirs) for name, (theirs, _) in base.items()}
    stated = {name: value for name, value in stated.items() if value is not None}
    name = str(take("model_name", default="default"))
    if name == "default":
        sizes = {name: default for name, (_, default) in base.items()} | stated
        settings.put("model.decoder", sizes | {"tied_embeddings": bool(take("logits_via_embedding", default=False))})
    else:
        _model(settings, "model_name", name)
        if stated and (model := settings.document.get("model")):
            decoder = model.pop("decoder", None) or _decoder(model.pop("preset"))
            settings.put("model.decoder", decoder | stated)
    islands = 1
    for axis in ("ici_diloco_parallelism", "dcn_diloco_parallelism"):
        islands *= max(1, count(axis, default=1))
    accumulation = count("gradient_accumulation_steps", default=1)
    part = number("per_device_batch_size", default=12)
    batch = max(1, round(part * settings.devices * accumulation))
    _islands(settings, islands)
    _batch(settings, batch, max(1, int(part)))
    steps = count("steps", default=150_001)
    settings.put("budget.steps", steps)
    settings.put("data.sequence_length", count("max_target_length", default=2_048))
    settings.put("seed", count("data_shuffle_seed", "init_weights_seed", default=0))
    kind, schedule = str(take("opt_type", default="adamw")), str(take("lr_schedule_type", default="cosine"))
    if kind not in ("adamw", "muon"):
        settings.note("opt_type", kind, "The job uses AdamW; another optimizer is a factory (inner_optimizer.factory).")
    length = count("learning_rate_schedule_steps", default=-1)
    length = length if length > 0 else steps
    _inner(
        settings,
        kind="muon" if kind == "muon" else "adamw",
        lr=number("learning_rate", default=3e-5),
        beta1=number("adam_b1", default=0.9),
        beta2=number("adam_b2", default=0.95),
        weight_decay=number("adam_weight_decay", default=0.1),
        warmup_steps=int(number("warmup_steps_fraction", default=0.1) * length),
        schedule=schedule if schedule in ("cosine", "wsd") else "linear",
        lr_final_ratio=number("learning_rate_final_fraction", "cosine_learning_rate_final_fraction", default=0.1),
        clip_norm=number("gradient_clipping_threshold", default=1.0) or None,
    )
    if length != steps:
        settings.note("learning_rate_schedule_steps", length, "The schedule of a job has the length of its budget.")
    settings.note_if("adam_eps", note="atoll's AdamW has 1e-8.", unless=(None, 1e-8))
    if z_loss := number("z_loss_multiplier", default=0.0):
        settings.put("training.z_loss", float(z_loss))
    if (balance := take("load_balance_loss_weight")) is not None:
        if "experts" in settings.document.get("model", {}).get("decoder", {}):
            settings.put("model.decoder.experts.balance_weight", float(balance))
        elif balance:
            settings.note("load_balance_loss_weight", balance, "The model has no experts.")
    settings.put("model.compute_dtype", "float32" if take("dtype", default="bfloat16") == "float32" else "bfloat16")
    settings.note_if("weight_dtype", note="Parameters are float32; payloads have the codec.", unless=(None, "float32"))
    settings.note_if("quantization", note="Matrix products are not quantised.")
    _remat(settings, take("remat_policy"), "remat_policy")
    if not take("enable_diloco", default=False):
        settings.note("enable_diloco", False, "Islands of a job always merge by DiLoCo.")
    is_streaming = take("enable_streaming_diloco", default=True)
    fragments = count("diloco_num_fragments", "num_diloco_fragments", default=1)
    overlap = count("diloco_num_comm_overlap_steps", "num_communication_overlapping_steps", default=0)
    _rounds(
        settings,
        count("diloco_sync_period", default=36),
        fragments if is_streaming else 1,
        overlap if is_streaming else 0,
    )
    _outer(settings, number("diloco_outer_lr", default=0.3), number("diloco_outer_momentum", default=0.9))
    if alpha := number("diloco_comm_overlap_alpha", "communication_overlapping_alpha", default=0.0):
        settings.put("synchroniser.adoption", "mix")
        settings.put("synchroniser.mix_alpha", float(alpha))
    source = {
        name: take(name) for name in ("dataset_type", "dataset_path", "dataset_name", "hf_path", "grain_train_files")
    }
    take("eval_dataset_name"), take("hf_name"), take("grain_file_type"), take("train_split"), take("dataset_dir")
    settings.note("dataset_type", next(filter(None, (source[one] for one in reversed(source))), "tfds"), _DATA)
    settings.note_if("tokenizer_path", note=_TOKENIZER)
    take("tokenizer_type")


def _opendiloco(settings: _Settings) -> None:
    take, count, number = settings.take, settings.count, settings.number
    models = {
        "llama-150m-fresh": {"width": 1_024, "layer_count": 12, "head_count": 16, "hidden_size": 2_688},
        "llama-1b-fresh": {
            **{"width": 2_048, "layer_count": 22, "head_count": 32, "key_value_head_count": 4},
            "hidden_size": 5_632,
        },
    }
    name = str(take("path_model", default="PrimeIntellect/llama-150m-fresh"))
    if (sizes := models.get(name.rpartition("/")[2])) is not None:
        heads = sizes["head_count"]
        more = {"vocabulary_size": 32_000, "key_value_head_count": heads, "head_size": sizes["width"] // heads}
        settings.put("model.decoder", {**more, **sizes, "tied_embeddings": False, "norm_epsilon": 1e-5})
    else:
        _model(settings, "path_model", name)
    _islands(settings, count("hv.galaxy_size", default=1))
    _batch(settings, count("total_batch_size", default=512), count("per_device_train_batch_size", default=32))
    settings.put("data.sequence_length", count("seq_length", default=1_024))
    settings.put("budget.steps", count("total_steps", "max_steps", default=88_000))
    _inner(
        settings,
        kind="adamw",
        lr=number("lr", default=4e-4),
        beta1=0.9,
        beta2=0.95,
        weight_decay=number("weight_decay", default=0.1),
        warmup_steps=count("warmup_steps", default=1_000),
        schedule="cosine",
        lr_final_ratio=0.0,
        clip_norm=1.0,
    )
    if "hv.local_steps" not in settings.values:
        settings.note("hv.local_steps", None, "Islands of a job always merge; H is 500, OpenDiLoCo's default.")
    _rounds(settings, count("hv.local_steps", default=500))
    _outer(settings, number("hv.outer_lr", default=0.7), 0.9)
    settings.put("model.compute_dtype", "float32" if take("precision") in ("fp32", "32-true") else "bfloat16")
    if take("hv.fp16", default=False):
        settings.note("hv.fp16", True, "Payloads have the codec of synchroniser.wire.")
    settings.note("dataset_name_or_path", take("dataset_name_or_path", default="allenai/c4"), _DATA)


PRIME_MODELS: Mapping[tuple[str, str], tuple[Any, ...]] = {
    ("llama2", "debugmodel"): (256, 2, 8),
    ("llama2", "150M"): (1_024, 12, 16),
    ("llama2", "271M"): (1_024, 16, 8),
    ("llama2", "1B"): (2_048, 18, 16),
    ("llama2", "7B"): (4_096, 32, 32),
    ("llama2", "10B"): (5_120, 32, 40),
    ("llama2", "13B"): (5_120, 40, 40),
    ("llama2", "26B"): (5_120, 80, 40),
    ("llama3", "debugmodel"): (256, 8, 16),
    ("llama3", "1B"): (2_048, 18, 16, 8, 1.3, 512),
    ("llama3", "8B"): (4_096, 32, 32, 8, 1.3, 1_024),
    ("llama3", "10B"): (4_096, 42, 32, 8, 1.3, 1_024),
    ("llama3", "70B"): (8_192, 80, 64, 8, 1.3, 4_096),
}
"""Width, layers, heads, key-value heads, and the ratio and multiple of the hidden size: see ``_llama``."""


def _prime(settings: _Settings) -> None:
    take, count, number = settings.take, settings.count, settings.number
    family = str(take("type_model", "model_type", default="llama2"))
    name = str(take("name_model", "model_name", default="150M"))
    if (sizes := PRIME_MODELS.get((family, name))) is not None:
        decoder = _llama(*sizes)
        older = {"vocabulary_size": 32_000, "rope_theta": 10_000.0} if family == "llama2" else {}
        settings.put("model.decoder", decoder | older)
    else:
        _model(settings, "name_model", f"{family}-{name}")
    _islands(settings, 1)
    settings.note("islands", 1, "A configuration of prime does not say how many nodes train: set islands.0.count.")
    micro = count("train.micro_bs", "hardware.micro_batch_size", default=16)
    _batch(settings, count("optim.batch_size", "train.batch_size", default=512), micro)
    settings.put("data.sequence_length", count("data.seq_length", default=1_024))
    schedule = str(take("optim.sched_type", default="cosine"))
    kind = str(take("optim.optim.type", default="adamw")).lower()
    if kind != "adamw":
        settings.note(
            "optim.optim.type", kind, "The job uses AdamW; another optimizer is a factory (inner_optimizer.factory)."
        )
    settings.put("budget.steps", count("optim.total_steps", default=88_000))
    _inner(
        settings,
        kind="adamw",
        lr=number("optim.optim.lr", default=4e-4),
        beta1=number("optim.optim.betas1", default=0.9),
        beta2=number("optim.optim.betas2", default=0.95),
        weight_decay=number("optim.optim.weight_decay", default=0.1),
        warmup_steps=count("optim.warmup_steps", default=1_000),
        schedule="wsd" if schedule.startswith("wsd") else "linear" if schedule == "linear" else "cosine",
        lr_final_ratio=0.0,
        clip_norm=1.0,
    )
    if schedule == "wsd-sqrt":
        settings.note("optim.sched_type", schedule, "The rate of a job's wsd falls linearly.")
    if take("optim.z_loss", default=False):
        settings.put("training.z_loss", float(number("optim.z_loss_weight", default=2e-4)))
    if "diloco.inner_steps" not in settings.values:
        settings.note("diloco.inner_steps", None, "Islands of a job always merge; set synchroniser.interval_steps.")
    _rounds(settings, count("diloco.inner_steps", default=100))
    _outer(settings, number("diloco.outer_lr", "train.outer_lr_scheduler.lr", default=0.7), 0.9)
    if str(take("diloco.compression", default="no")) == "uint8":
        settings.put("synchroniser.wire", {"up": "int8", "down": "int8"})
    _remat(settings, take("train.ac_ckpt"), "train.ac_ckpt")
    settings.note("data.dataset_name_or_paths", take("data.dataset_name_or_paths", default="allenai/c4"), _DATA)


def _yeto(settings: _Settings) -> None:
    take, count, number = settings.take, settings.count, settings.number
    _model(settings, "model", str(take("model", default="qwen3-8b")))
    entries = [entry for entry in str(take("gpu", default="")).split(",") if entry]
    arms = re.fullmatch(r"m(\d+)", str(take("settings", default="")))
    _islands(settings, len(entries) or (int(arms[1]) if arms else 1))
    if entries:
        settings.note("gpu", entries, "Name node groups in islands: one entry for each kind of machine.")
    batch = count("micro_batch_size", default=1) * count("fixed_window_microsteps", "grad_accum", default=1)
    _batch(settings, batch * settings.devices, max(1, batch))
    length = count("seq_len", default=2_048)
    settings.put("data.sequence_length", length)
    if (tokens := take("token_budget")) is not None:
        settings.put("budget.tokens", int(tokens))
    else:
        settings.put("budget.steps", count("learner_max_steps", "max_steps", default=1_000))
    take("learner_max_steps")
    _inner(
        settings,
        kind="adamw",
        lr=number("inner_lr", "lr", default=1e-4),
        weight_decay=number("weight_decay", default=0.0),
    )
    settings.put("seed", count("training_seed", "seed", default=0))
    _rounds(settings, count("sync_every", "inner_steps", "h", default=24), count("fragments", default=8), 2)
    outer = str(take("outer_optimizer", default="nesterov"))
    momentum = number("outer_momentum", default=0.9)
    _outer(settings, number("outer_lr", default=0.7), 0.0 if outer == "sgd" else momentum)
    rank, alpha = take("lora_r"), take("lora_alpha")
    if rank is not None and "trainable" in JobSpec.model_fields:
        settings.put("trainable.lora", {"rank": int(rank), **({"alpha": float(alpha)} if alpha is not None else {})})
    elif rank is not None:
        settings.note("lora_r", rank, "A job trains all parameters.")
    settings.note("data", take("data", default=""), f"{_DATA} Conversations need a trainer that knows their format.")
    settings.note_if("pad_to_fixed_window_tokens", "fixed_window_tokens", "max_rows", note="a job has no such setting")


_READERS: Mapping[Framework, Callable[[_Settings], None]] = {
    "torchtitan": _torchtitan,
    "maxtext": _maxtext,
    "opendiloco": _opendiloco,
    "prime": _prime,
    "yeto": _yeto,
}
