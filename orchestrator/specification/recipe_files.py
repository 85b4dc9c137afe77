"""A configuration of another framework as a flat mapping of names to values, whatever kind of file has it.

TOML and YAML are parsed. A script is split into words, never executed: the last command that starts a known program counts,
and of the rest only plain assignments of variables (``NAME=value``), which are put in the place of ``$NAME``,
``${NAME}`` and ``${NAME:-default}``. A task of SkyPilot, a mapping with a script in ``run``, is that script.
``orchestrator.specification.recipes`` knows what the names mean.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

from orchestrator.errors import ConfigurationError
from orchestrator.specification import documents

Framework = Literal["torchtitan", "maxtext", "opendiloco", "prime", "yeto"]
RECIPE_BYTES_MAX = 1 << 20
WORDS_MAX = 10_000


OPERATIONAL: Mapping[Framework, tuple[str, ...]] = {
    "torchtitan": (
        *(
            "job.*",
            "profiling.*",
            "metrics.*",
            "checkpoint.*",
            "comm.*",
            "debug.*",
            "memory_estimation.*",
            "validation.*",
        ),
        *(
            "compile.*",
            "training.compile",
            "training.gc_freq",
            "fault_tolerance.process_group*",
            "optimizer.implementation",
        ),
        *(
            "fault_tolerance.replica_id",
            "fault_tolerance.enable",
            "training.deterministic",
            "model.print_after_conversion",
        ),
        *("activation_checkpoint.selective_ac_option", "activation_checkpoint.per_op_*", "experimental.*", "nproc*"),
    ),
    "maxtext": (
        *("run_name", "base_output_directory", "enable_checkpointing", "checkpoint_*", "async_checkpointing", "log_*"),
        *(
            "enable_profiler",
            "profiler*",
            "skip_first_n_steps_for_profiler",
            "metrics_*",
            "enable_tensorboard",
            "hardware",
        ),
        *("attention", "scan_layers", "use_iota_embed", "ici_*", "dcn_*", "sa_*", "jax_cache_dir", "monitor_goodput"),
        *("enable_goodput_*", "save_config_to_gcs", "gcs_*", "compile_*", "num_slices", "reuse_example_batch"),
    ),
    "opendiloco": (
        *(
            "project",
            "log_*",
            "ckpt.*",
            "checkpoint_*",
            "sharding_strategy",
            "torch_compile",
            "no_torch_compile",
            "nnodes",
        ),
        *("hv.initial_peers", "hv.world_rank", "hv.*timeout*", "hv.skip_load_from_peers", "hv.host_*", "hv.announce_*"),
        *(
            "hv.matchmaking_time",
            "nproc_per_node",
            "rdzv*",
            "resume_from_checkpoint",
            "attn_implementation",
            "num_workers",
        ),
    ),
    "prime": (
        *(
            "project",
            "run_id",
            "wandb",
            "log*",
            "ckpt.*",
            "monitor.*",
            "train.torch_compile",
            "train.memory_profiler.*",
        ),
        *(
            "train.attn_fn",
            "train.reshard_after_forward",
            "train.log_model_hash",
            "data.num_workers",
            "metric_*",
            "pccl.*",
        ),
        *("train.torch_profiler", "hardware.*", "diloco.retry_all_reduce"),
    ),
    "yeto": (
        *("budget", "confirm", "output", "report_dir", "work_dir", "device", "gpu_slots", "syncer_*", "wandb*", "name"),
        *(
            "learner_push_delay_ms",
            "learner_delay_jitter_ms",
            "shuffle_rows_seed",
            "eval_rows",
            "baseline_loss",
            "spot",
        ),
    ),
}
"""Patterns of settings without effect on what is trained: where it runs, what it logs, where it writes."""


def settings_of(content: bytes, name: str) -> tuple[dict[str, Any], Framework | None]:
    """Return the settings of a configuration, and its framework if a command or the names of its settings show it.

    Raises ConfigurationError, with the file's name.
    """
    if len(content) > RECIPE_BYTES_MAX:
        raise refused(f"{name} has more than {RECIPE_BYTES_MAX >> 10:,} KiB", "Name the configuration alone")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise refused(f"{name} is not UTF-8", "Name a configuration of text") from error
    values, framework = _values(text, name)
    return values, framework or _recognised(values)


def refused(message: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(detail=f"{message}. {remedy}.")


def _values(text: str, name: str) -> tuple[dict[str, Any], Framework | None]:
    ending = name.rpartition(".")[2].lower()
    if ending == "toml":
        try:
            return _flat(tomllib.loads(text)), None
        except tomllib.TOMLDecodeError as error:
            raise refused(f"{name} is not valid TOML: {error}", "Correct it") from error
    if ending in ("yaml", "yml", "json"):
        parse = documents.read_json if ending == "json" else documents.read_yaml
        document = parse(text.encode(), documents.FILE, name)
        if not isinstance(document, Mapping):
            raise refused(f"{name} is no mapping of settings", "Name a configuration")
        if isinstance(command := document.get("run"), str):  # a task of SkyPilot
            return _of_script(command, name)
        return _flat(document), None
    return _of_script(text, name)


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in document.items():
        values |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


_PROGRAMS: tuple[tuple[str, Framework], ...] = (
    (r"\byeto (launch|shape)\b|compare_diloco\.py", "yeto"),
    (r"\btrain_fsdp\.py\b|\brun_training\.sh\b", "opendiloco"),
    (r"\bzeroband\b|src/zeroband/train\.py", "prime"),
    (r"\bmaxtext\b|MaxText/train\.py", "maxtext"),
    (r"\btorchtitan\b|run_train\.sh|--training\.\w", "torchtitan"),
)


def _of_script(text: str, name: str) -> tuple[dict[str, Any], Framework | None]:
    """Return the settings of the last command of a script that trains, and the framework of its program."""
    variables: dict[str, str] = {}
    command, framework = "", None
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if assigned := re.fullmatch(r"\s*(?:export\s+)?(\w+)=(\"[^\"]*\"|'[^']*'|[^\s;|&]*)\s*(?:#.*)?", line):
            variables[assigned[1]] = _expanded(assigned[2].strip("\"'"), variables)
            continue
        program = next((one for pattern, one in _PROGRAMS if re.search(pattern, line, re.IGNORECASE)), None)
        if program is not None and not line.lstrip().startswith(("#", "echo ", "cd ")):
            command, framework = line, program
    if framework is None:
        return {}, None
    try:
        words = shlex.split(_expanded(command, variables), comments=True)
    except ValueError as error:
        raise refused(f"{name} has a command that cannot be split into words ({error})", "Correct it") from error
    if len(words) > WORDS_MAX:
        raise refused(f"{name} has a command of {len(words):,} words", "Name a shorter one")
    return _of_words(words), framework


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2] or ""
        return variables.get(name) or default

    return re.sub(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)", value, text)


def _of_words(words: list[str]) -> dict[str, Any]:
    """Return the settings of a command line: ``--name value``, ``--name=value``, ``--flag`` and ``name=value``."""
    values: dict[str, Any] = {}
    at = 0
    while at < len(words):
        word, following = words[at], words[at + 1] if at + 1 < len(words) else None
        at += 1
        if word.startswith("--"):
            key, is_assigned, value = word[2:].partition("=")
            if not is_assigned:
                if following is None or following.startswith("--"):
                    value = "true"
                else:
                    value, at = following, at + 1
            values[key.replace("-", "_")] = _scalar(value)
        elif (assigned := re.fullmatch(r"([a-z_]\w*)=(.*)", word)) is not None:
            values[assigned[1]] = _scalar(assigned[2])
    return values


def _scalar(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if re.fullmatch(r"[-+]?\d[\d_]*", word) and len(word) < 30:
        return int(word.replace("_", ""))
    if (
        re.fullmatch(r"[-+]?(\d[\d_]*)?\.?\d+([eE][-+]?\d{1,3})?|[-+]?\d+\.([eE][-+]?\d{1,3})?", word)
        and len(word) < 40
    ):
        return float(word.replace("_", ""))
    return word


def _recognised(values: Mapping[str, Any]) -> Framework | None:
    names = set(values)
    if names & {"training.seq_len", "training.local_batch_size", "model.flavor", "fault_tolerance.enable"}:
        return "torchtitan"
    if names & {"name_model", "type_model", "diloco.inner_steps", "optim.optim.lr", "train.micro_bs"}:
        return "prime"
    if names & {"per_device_batch_size", "max_target_length", "base_emb_dim", "enable_diloco"}:
        return "maxtext"
    if names & {"hv.local_steps", "path_model"}:
        return "opendiloco"
    return None
