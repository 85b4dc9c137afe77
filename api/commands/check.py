"""`atoll check`: what a job would run, and all problems of its specification, before anything runs. Needs no service.

`atoll import` writes a specification from another framework's configuration.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.commands.common import HomeOption, PackagesOption, UrlOption, connect, echo, echo_json, echo_lines, say
from api.installation.home import DEFAULT_HOME
from orchestrator.system import python_process, user_packages
from orchestrator.system.plain import counted

if TYPE_CHECKING:
    from orchestrator.errors import Problem
    from orchestrator.specification.config import JobSpec
    from orchestrator.specification.sections import IslandsSection

DEVICES_MAX = 256
GIB = 2**30


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job specification, YAML or JSON.")],
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    packages: PackagesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what would run as JSON.")] = False,
) -> None:
    """Check a job specification, and show what would run: model, optimizer, memory, and the first batch of its text.

    The packages' code runs here in a separate process, as it would in an island; nothing is compiled or trained. Without a
    service the node groups are not checked. If there are problems, all are reported, with exit code 2.
    """
    from orchestrator.errors import InvalidJobSpec
    from orchestrator.specification.config import read_job_document

    environment = user_packages.child_environment(os.environ, packages or ())
    document = read_job_document(file)
    problems: list[Problem] = []
    spec, unchecked = _accepted(document, home, url, problems)
    result: dict[str, Any] = {}
    if spec is not None:
        result, of_child = _in_processes(spec, environment)
        paths = {problem.path for problem in problems}
        has_text = not any(
            path.startswith("data.") for path in paths
        )  # else the process reports the same problem again
        of_child = [problem for problem in of_child if has_text or not problem.path.startswith("data.")]
        problems += [problem for problem in of_child if problem.path not in paths]
        unchecked += _beyond(spec)
    if problems or spec is None:
        raise InvalidJobSpec(detail=f"{file} is invalid", problems=tuple(dict.fromkeys(problems)))
    facts = _facts(spec, result) | {"not_checked": unchecked}
    if as_json:
        echo_json(json.dumps(facts, indent=2))
        return
    for name, text in _lines(facts):
        echo(f"{name:<13} {text}")
    say(f"{file} can be submitted" if not unchecked else f"{file} has no problems in what was checked")


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A configuration, or a script that starts training.")],
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework",
            metavar="NAME",
            help="torchtitan, maxtext, opendiloco, prime or yeto.",
            show_default="recognised by the settings' names",
        ),
    ] = None,
    node_group: Annotated[
        str, typer.Option("--node-group", metavar="NAME", help="Node group of the islands.")
    ] = "default",
    devices: Annotated[int, typer.Option("--devices", min=1, max=4096, help="Accelerators of one island.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the job there.", show_default="print it"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the job and the settings that it lacks as JSON.")
    ] = False,
) -> None:
    """Make a job specification from a configuration of torchtitan, MaxText, OpenDiLoCo, prime or yeto.

    Settings for which a job has no equivalent are listed with what to do. A script is not executed: the last command in it
    that starts training counts. Batches per device are multiplied by `--devices`.
    """
    from orchestrator.errors import ConfigurationError
    from orchestrator.specification import recipes

    if framework is not None and framework not in recipes.FRAMEWORKS:
        raise typer.BadParameter(f"{framework!r} is unknown. Use {', '.join(recipes.FRAMEWORKS)}.")
    try:
        with open(file, "rb") as opened:
            content = opened.read(recipes.RECIPE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigurationError(detail=f"{file} cannot be read: {error.strerror}. Check the path.") from error
    recipe = recipes.read(content, file.name, framework, devices, node_group)
    if as_json:
        echo_json(json.dumps(recipe.as_dict(), indent=2))
    elif output is None:
        echo_lines(recipe.yaml(), nl=False)
    if output is not None:
        try:
            with open(output, "x", encoding="utf-8") as written:
                written.write(recipe.yaml())
        except FileExistsError as error:
            message = f"{output} exists already. Name another file, or remove it."
            raise ConfigurationError(detail=message) from error
    for one in recipe.unmatched:
        say(f"no equivalent: {one}")
    if recipe.operational:
        say(f"left out, without effect on training: {', '.join(recipe.operational)}")
    if output is not None:
        say(f"{output} is written; see `atoll check {output}`")


def _accepted(
    document: Mapping[str, Any], home: Path, url: str | None, problems: list[Problem]
) -> tuple[JobSpec | None, list[str]]:
    """Return the specification, or its valid part, and what was not checked. The service checks it if one answers."""
    from orchestrator.errors import InvalidJobSpec, ServiceUnreachable
    from orchestrator.models.huggingface.weights import completed, problems_of
    from orchestrator.specification.config import parse_job, right_sections
    from orchestrator.specification.data_check import data_problems, with_found_files, with_stored_bytes
    from orchestrator.system.roots import EVERYTHING

    try:
        with connect(home, url) as client:
            return parse_job(client.check(document).specification), []
    except InvalidJobSpec as error:
        problems += error.problems
        return right_sections(document, problems), []
    except (ServiceUnreachable, FileNotFoundError):  # a relative home in a working folder that was removed is no home
        unchecked = ["node groups, their memory, and allowed folders: no service answers (`atoll up`)"]
    try:
        document = completed(document, EVERYTHING)
    except InvalidJobSpec as error:
        problems += error.problems
    try:
        spec: JobSpec | None = parse_job(document)
    except InvalidJobSpec as error:
        problems += error.problems
        spec = right_sections(document, problems)
    try:
        if spec is not None:
            problems += problems_of(spec, EVERYTHING)
            spec = with_found_files(spec, EVERYTHING)
            problems += data_problems(spec, EVERYTHING)
            spec = with_stored_bytes(spec, EVERYTHING)
    except InvalidJobSpec as error:
        problems += error.problems
    return spec, unchecked


def _in_processes(spec: JobSpec, environment: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """Return what a process for each framework finds out about the job's code and text, and the problems that they find."""
    result: dict[str, Any] = {}
    problems: list[Problem] = []
    for entry in {entry.framework: entry for entry in reversed(spec.islands)}.values():
        own, of_child = _in_a_process(spec, entry, environment)
        result |= own
        problems += of_child
    return result, problems


def _in_a_process(
    spec: JobSpec, entry: IslandsSection, environment: Mapping[str, str]
) -> tuple[dict[str, Any], list[Problem]]:
    """Return what a separate process finds out about an island of this entry, and the problems that it finds."""
    from orchestrator.errors import Problem

    devices = min(DEVICES_MAX, max(1, entry.accelerators) * entry.hosts)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    child = subprocess.run(
        python_process.command("learners.job_check"),
        input=json.dumps(spec.island_document(entry)),
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "XLA_FLAGS": flags},
        check=False,
    )
    try:
        result: dict[str, Any] = json.loads(child.stdout)
    except ValueError:
        why = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        message = f"the process that builds the model and reads the text ended unexpectedly ({why})."
        return {}, [Problem("the job", message, "See its output above; check its memory, and native code.")]
    return result, [Problem(**problem) for problem in result.pop("problems")]


def _beyond(spec: JobSpec) -> list[str]:
    """Return what checking one entry on this machine cannot find out."""
    open_questions = []
    if not spec.trainer.reads_text:
        open_questions.append(f"the text: {spec.trainer.factory} reads it itself")
    if any(entry.accelerators for entry in spec.islands):
        open_questions.append("the accelerators: the model was traced for CPU devices")
    return open_questions


def _facts(spec: JobSpec, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what would run, as plain data."""
    from orchestrator.simulation.advice import advice
    from orchestrator.specification.memory_budget import demand_of

    demand = demand_of(spec, result["model"]["parameters"])
    sync, inner = spec.synchroniser, spec.training.inner_optimizer
    memory = {"head": demand.head} | {f"islands.{index}": needed for index, needed in enumerate(demand.islands)}
    memory |= {f"shards.{number}": needed for number, needed in enumerate(demand.shards)}
    return {
        "name": spec.name,
        "islands": list(spec.island_sections()),
        "node_groups": sorted({entry.node_group for entry in spec.islands} | {*sync.node_groups, *sync.shard_groups}),
        "model": {"of": _model_name(spec)} | {"trainer": spec.trainer.factory, **result["model"]},
        "memory_bytes": memory,
        "token_budget": spec.token_budget,
        "steps": spec.horizon_steps,
        "batches": {name: spec.batch_size_of(entry) for name, entry in spec.island_sections().items()},
        "sequence_length": spec.data.sequence_length,
        "tokens_per_step": spec.tokens_per_schedule_step,
        "batch_ramp": spec.training.batch_ramp and spec.training.batch_ramp.model_dump(),
        "optimizer": {"kind": inner.factory or inner.kind, "lr": inner.lr, "warmup_steps": inner.warmup_steps},
        "synchroniser": {
            "interval_steps": sync.interval_steps,
            "fragments": sync.fragments,
            "overlap_steps": sync.overlap_steps,
            "router_interval_steps": sync.router_interval_steps,
            "quorum": spec.quorum,
            "wire": sync.wire.model_dump(),
            "outer_optimizer": sync.outer_optimizer.model_dump(),
        },
        "data": result.get("data"),
        "warnings": [f"{one.path}: {one.message} {one.remedy}" for one in advice(spec)],
    }


def _model_name(spec: JobSpec) -> str:
    section = spec.model
    if spec.trainer.model is not None:
        return spec.trainer.model
    if section.decoder is not None or section.is_described_by_weights:
        return section.initial_weights or "decoder"
    return section.factory or section.preset


def _router_words(sync: Mapping[str, Any]) -> str:
    own = sync["router_interval_steps"]
    return "" if own is None else f", routers every {own:,}"


def _outer_words(outer: Mapping[str, Any]) -> str:
    own = {"sgd": (), "adam": ("beta1", "beta2", "epsilon")}.get(outer["kind"], ("momentum",))
    numbers = (f"{name} {outer[name]:g}" for name in ("lr", *own))
    clip = "" if outer["clip_norm"] is None else f", clipped to a norm of {outer['clip_norm']:g}"
    return f"outer {outer['kind']} {' '.join(numbers)}{clip}"


def _batch_words(facts: Mapping[str, Any]) -> str:
    batches, ramp = sorted(set(facts["batches"].values())), facts["batch_ramp"]
    words = f"{' or '.join(map(str, batches))} sequences of {facts['sequence_length']:,} tokens"
    words += f"; {facts['tokens_per_step']:,} tokens in a step of all islands"
    if ramp is not None:
        words += f", from 1/{ramp['parts']} of that over the first {ramp['tokens']:,} tokens"
    return words


def _lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, sync, optimizer, data = (facts[name] for name in ("model", "synchroniser", "optimizer", "data"))
    islands = facts["islands"]
    least, most = model["fragment_parameters_min"], model["fragment_parameters_max"]
    sizes = f"each of {least:,} parameters" if least == most else f"each of {least:,} to {most:,} parameters"
    if (of_routers := model["router_fragment_parameters"]) is not None:
        sizes += f", but the last of {of_routers:,} in routers"
    lines = [
        ("job", f"{facts['name']}: {counted(len(islands), 'island')} on {', '.join(facts['node_groups'])}"),
        ("model", f"{model['of']}: {model['parameters']:,} parameters in {model['tensors']:,} tensors"),
        ("fragments", f"{model['fragments']:,}, {sizes}"),
        ("memory", ", ".join(f"{where} {needed / GIB:.2f} GiB" for where, needed in facts["memory_bytes"].items())),
        (
            "budget",
            f"{facts['token_budget']:,} tokens: {facts['steps']:,} steps of each island, if all are equally fast",
        ),
        ("optimizer", f"{optimizer['kind']}, lr {optimizer['lr']:g}, warm-up {optimizer['warmup_steps']:,} steps"),
        (
            "synchroniser",
            f"every {sync['interval_steps']:,} steps (H){_router_words(sync)}, {sync['fragments']:,} fragments (P), overlap "
            f"{sync['overlap_steps']:,}, quorum {sync['quorum']:,} of {len(islands)}, {sync['wire']['up']} up, "
            f"{sync['wire']['down']} down, {_outer_words(sync['outer_optimizer'])}",
        ),
        ("batch", _batch_words(facts)),
    ]
    if data is not None:
        lines += [
            (
                "tokenizer",
                f"{data['tokenizer']}: {data['vocabulary_size']:,} tokens, {data['separator']:,} between documents",
            ),
            ("held out", f"{data['held_out_sequences']:,} sequences"),
            ("first tokens", f"{' '.join(map(str, data['first_tokens'][:8]))} …"),
            ("first text", repr(data["first_text"])),
        ]
    lines += [("warning", warning) for warning in facts["warnings"]]
    return lines + [("not checked", what) for what in facts["not_checked"]]


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Jobs")(check)
    app.command("import", rich_help_panel="Jobs")(import_)
