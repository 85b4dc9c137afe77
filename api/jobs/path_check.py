"""Checks of a submitted specification against this installation: its fleet, its allowed folders, and the files it names.

**Fleet** (pure): unknown node groups, a host of an island larger than any node of its group, more hosts than nodes, and more
than a group has in total. What is free right now does not matter: a job may wait for room. Kinds of accelerators are not
distinguished, because a group's record does not say them.

**Paths**: every named file and folder must lie below a root (``orchestrator.system.roots``). Checked at submission, when the
job starts, and when a service with possibly other roots restarts it; reading a file checks it again. Links are followed.
Nothing is opened except pretrained weights (``weights_problems``), of which only the headers are read.

**Index**: it is sound and fits the job's data as far as that is visible here; its digest becomes part of the specification.
Every island repeats the check on its node, where other files may be, and also compares how files are cut.

**Tokenizer**: its file exists and its vocabulary fits the model. Its digest and the tokens around a document become part of
the specification. Every island compares the digest with its node's file, and a resumed job with the checkpoint's.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from api.run.folder import open_below, put
from orchestrator.errors import (
    AtollError,
    ConfigurationError,
    Conflict,
    InvalidJobSpec,
    NotFound,
    OutsideRoots,
    Problem,
    UnfitWeights,
    first_line,
)
from orchestrator.models.decoder import DecoderSection
from orchestrator.specification.bounds import BYTE_COUNT, BYTES
from orchestrator.specification.config import JobSpec, too_many_entries
from orchestrator.specification.memory_budget import has_frozen
from orchestrator.specification.sections import IslandsSection
from orchestrator.specification.training_sections import INSTALL_4_BIT, INSTALL_TORCH, TrainableSection, TrainerSection
from orchestrator.specification.validation import closest
from orchestrator.status import NodeGroupRecord, UnseenFile
from orchestrator.system.plain import brief, some_of
from orchestrator.system.roots import Allowed, AllowedRoots, data_bytes, open_data
from orchestrator.system.run_folder import TOKENIZER
from orchestrator.text import chat_template, data_index, token_files, tokenizer_file
from orchestrator.text.data_index import FIELD as INDEX_FIELD

DIGEST = "data.index_digest"
FOLDER, FILES, CHECKPOINT = "checkpoints.folder", "data.files", "resume.checkpoint"
TORCH_MODEL = "trainer.model"
ADAPTER = "adapter_config.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TEMPLATE = "data.template"
TOKENIZER_FIELD, INDEX, WEIGHTS = "data.tokenizer", "data.index", "model.initial_weights"
TOKENIZER_DIGEST, WEIGHTS_DIGEST = "data.tokenizer_digest", "model.weights_digest"
PIECE_BYTES = 256 << 10


def group_problems(document: Mapping[str, Any], groups: Sequence[NodeGroupRecord]) -> tuple[Problem, ...]:
    """Return a problem for each node group that the specification names and the fleet lacks.

    The specification may have other problems.
    """
    if too_many_entries(document):
        return ()
    names = sorted(group["name"] for group in groups)
    islands, evaluation = document.get("islands"), document.get("evaluation")
    entries = list(islands) if isinstance(islands, list | tuple) else []
    sections = [(f"islands.{index}", entry) for index, entry in enumerate(entries)] + [("evaluation", evaluation)]
    named = [
        (f"{path}.node_group", section.get("node_group")) for path, section in sections if isinstance(section, Mapping)
    ]
    named += _groups_of_synchroniser(document)
    return tuple(
        Problem(
            path,
            f"is {brief(group)}, but the fleet has {some_of(names) or 'none at all'}.",
            f"{_meant(group, names)}, or restart the service with a --groups file that has it.",
        )
        for path, group in named
        if isinstance(group, str) and group not in names
    )


def _groups_of_synchroniser(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the node groups on which the synchroniser or its shards are to run, each with its place."""
    section = document.get("synchroniser")
    lists = (
        {name: section.get(name) for name in ("node_groups", "shard_groups")} if isinstance(section, Mapping) else {}
    )
    return [
        (f"synchroniser.{name}.{index}", group)
        for name, groups in lists.items()
        for index, group in enumerate(groups if isinstance(groups, list | tuple) else ())
    ]


def shard_problems(shard_groups: Sequence[str], groups: Sequence[NodeGroupRecord]) -> tuple[Problem, ...]:
    """Return a problem for each node group of the shards that has no node: a job cannot begin without its shards."""
    empty = {group["name"] for group in groups if not group["nodes"]}
    return tuple(
        Problem(
            f"synchroniser.shard_groups.{index}",
            f"is {group!r}, which has no node now, and a job does not begin without its shards.",
            f"Start a node with `atoll join --group {group}`, or name another group.",
        )
        for index, group in enumerate(shard_groups)
        if group in empty
    )


def _meant(group: str, names: Sequence[str]) -> str:
    meant = closest(group, names)
    return f"Use {meant}, if you mean that" if meant else "Use one of these"


def fleet_problems(
    islands: Mapping[int, IslandsSection] | Sequence[IslandsSection], groups: Sequence[NodeGroupRecord]
) -> tuple[Problem, ...]:
    """Return a problem for everything that these islands ask for and their node groups can never provide."""
    groups_by_name = {group["name"]: group for group in groups}
    problems: list[Problem] = []
    entries_of: dict[str, list[int]] = defaultdict(list)
    islands = islands if isinstance(islands, Mapping) else dict(enumerate(islands))
    with_accelerators = [group["name"] for group in groups if group["accelerators"]]
    for index, section in islands.items():
        if section.node_group in groups_by_name:
            entries_of[section.node_group].append(index)
    for name, indices in entries_of.items():
        group, sections = groups_by_name[name], [islands[i] for i in indices]
        where = f"islands.{indices[0]}" if len(indices) == 1 else "islands"
        if not group["nodes"]:
            continue  # no node answers right now, so what one of them has is unknown: islands wait for one
        node_count = group["nodes"] + group.get("nodes_down", 0)  # those that are cut off may be back
        few = [index for index in indices if islands[index].hosts > node_count]
        problems += [
            Problem(
                f"islands.{index}.hosts",
                f"is {islands[index].hosts}, but node group {name!r} has {node_count} nodes, and each host needs one.",
                f"Set it to at most {node_count}, or give the group more nodes.",
            )
            for index in few
        ]
        for field in ("cpus", "accelerators"):
            one_node: float = group[field] / group["nodes"]  # they are of one kind
            has = one_node * node_count
            too_large = [index for index in indices if getattr(islands[index], field) > one_node]
            for index in too_large:
                if not has:
                    message = (
                        f"asks for {getattr(islands[index], field):g} {field} on node group {name!r}, which has none."
                    )
                    others = some_of(sorted(with_accelerators))
                    remedy = f"Use a group that has some: {others}." if others else "No group has any: set it to 0."
                    if field == "accelerators":
                        remedy += " With accelerator: cpu an island needs none."
                    problems.append(Problem(f"islands.{index}.{field}", message, remedy))
                    continue
                problems.append(
                    Problem(
                        f"islands.{index}.{field}",
                        f"asks for {getattr(islands[index], field):g} {field} on one node of {name!r}, "
                        f"whose nodes have {one_node:g} each.",
                        f"Ask for at most {one_node:g} (the value is per host), or use a group with larger nodes.",
                    )
                )
            amount = sum(getattr(one, field) * one.hosts * (one.count + one.standby) for one in sections)
            if amount > has and not too_large and not few:
                problems.append(
                    Problem(
                        f"{where}.{field}",
                        f"asks for {amount:g} {field} on node group {name!r}, which has {has:g} in total.",
                        f"Ask for at most {has:g} there, move islands to another group, or give the group more.",
                    )
                )
    return tuple(problems)


def sections_of(document: Mapping[str, Any]) -> dict[int, IslandsSection]:
    """Return the valid entries of a specification's islands, by index. The specification may have problems."""
    islands = document.get("islands")
    if too_many_entries(document) or not isinstance(islands, list | tuple):
        return {}
    sections = {}
    for index, entry in enumerate(islands):
        with suppress(ValidationError):
            sections[index] = IslandsSection.model_validate(entry)
    return sections


def with_index_digest(spec: JobSpec, roots: AllowedRoots) -> JobSpec:
    """Return the specification, which has its tokenizer's digest, with that of its index too.

    Raises InvalidJobSpec. A file outside the roots is not reported here, but by ``problems_outside_roots``.
    """
    section = spec.data
    if section.index is None:
        return spec
    try:
        index, digest = data_index.read(roots, section.index)
    except OutsideRoots:
        return spec
    except ConfigurationError as error:
        message = str(error).removeprefix(f"{INDEX_FIELD}: ")
        raise InvalidJobSpec(problems=(Problem(INDEX_FIELD, message, "Correct the path, or leave it out."),)) from error
    if section.index_digest not in (None, digest):
        message = f"is {section.index_digest}, but the file has {digest}."
        raise InvalidJobSpec(problems=(Problem(DIGEST, message, "Leave it out, or use the file with that digest."),))
    tokenizer = data_index.counted_with(section.tokenizer_digest or BYTES, isinstance(section.begin_token, int))
    problem = data_index.misfit(index, section, tokenizer, lambda path: _size(roots, path))
    if problem is not None:
        raise InvalidJobSpec(problems=(problem,))
    return spec.model_copy(update={"data": section.model_copy(update={"index_digest": digest})})


def _size(roots: AllowedRoots, path: str) -> int | None:
    """Return the file's size; None for a file in a store, which would take long, or one that is not on this machine."""
    if "://" in path:
        return None
    try:
        return data_bytes(roots, path)
    except (OSError, ConfigurationError):
        return None


def problems_outside_roots(spec: JobSpec, roots: AllowedRoots, *, begun: bool = False) -> tuple[Problem, ...]:
    """Return a problem for each path that jobs may not use. A job that has ``begun`` no longer reads its checkpoint."""
    return tuple(_problems(spec, roots, begun))


def with_described_model(document: Mapping[str, Any], roots: AllowedRoots) -> Mapping[str, Any]:
    """Return the document with the decoder of its weights, if nothing else names a model. Raises InvalidJobSpec."""
    model = document.get("model")
    if not isinstance(model, Mapping) or model.get("initial_weights") is None:
        return document
    # brings NumPy, which the service needs for nothing else
    from orchestrator.models.huggingface.weights import completed

    return completed(document, roots)


def weights_problems(spec: JobSpec, roots: AllowedRoots) -> tuple[Problem, ...]:
    """Return the problems of ``model.initial_weights``: their folder, or weights of another model."""
    if spec.trainer.kind == "torch":
        return tuple(_torch_problems(spec.trainer, spec.trainable, roots))
    if spec.model.initial_weights is None:
        return ()
    # brings NumPy, which the service needs for nothing else
    from orchestrator.models.huggingface.weights import problems_of

    return problems_of(spec, roots)


def with_weights_digest(spec: JobSpec, roots: AllowedRoots) -> JobSpec:
    """Return the specification with the digest of its initial weights, if islands read them. Raises InvalidJobSpec.

    Weights that cannot be read are not reported here, but by ``weights_problems``.
    """
    section, network = spec.model, spec.model.network
    if not has_frozen(spec):
        return spec
    from orchestrator.models.huggingface.weights import Weights, folder_digest  # bring NumPy

    try:
        if spec.trainer.folder is not None:
            digest = folder_digest(spec.trainer.folder, roots)
        elif section.initial_weights is not None and isinstance(network, DecoderSection):
            digest = Weights(network, section.initial_weights, roots).digest()
        else:
            return spec
    except UnfitWeights:
        return spec
    if section.weights_digest not in (None, digest):
        message = f"is {section.weights_digest}, but the weights have {digest}."
        raise InvalidJobSpec(problems=(Problem(WEIGHTS_DIGEST, message, "Leave it out, or use the weights with it."),))
    return spec.model_copy(update={"model": section.model_copy(update={"weights_digest": digest})})


def _torch_problems(trainer: TrainerSection, part: TrainableSection | None, roots: AllowedRoots) -> Iterator[Problem]:
    """Yield the problems of a torch trainer that the service can see: of its libraries, and of its model's folder."""
    folder = trainer.folder
    needed = {"torch": True, "transformers": folder is not None, "peft": part is not None and part.lora is not None}
    for library in (name for name, is_needed in needed.items() if is_needed):
        if importlib.util.find_spec(library) is None:
            message = f"is torch, but {library} is not installed beside the service, which creates version 0."
            yield Problem("trainer.kind", message, INSTALL_TORCH)
    if part is not None and part.base is not None and importlib.util.find_spec("bitsandbytes") is None:
        message = f"is {part.base}, but bitsandbytes is not installed beside the service, which creates version 0."
        yield Problem("trainable.base", message, INSTALL_4_BIT)
    if folder is None:
        return
    from orchestrator.models.huggingface import configuration, files, origin  # bring NumPy

    try:
        config = origin.taken(folder, roots).mapping(origin.CONFIG)
    except (AtollError, OSError) as error:
        if _size(roots, f"{folder.rstrip('/')}/{ADAPTER}") is not None:
            message, remedy = (
                f"{folder} has adapters ({ADAPTER}) and no model.",
                "Merge them into their base, or name that.",
            )
            yield Problem(TORCH_MODEL, message, remedy)
            return
        remedy = "Name a folder that transformers can load, below a root (`atoll up --data`)."
        yield Problem(TORCH_MODEL, str(error), remedy)
        return
    if "quantization_config" in config:
        message = f"{folder} is quantised, but parameters that train are merged in float32."
        yield Problem(TORCH_MODEL, message, "Dequantise it and save it again.")
    if (named := configuration.headless(config)) is not None:
        message = f"{folder} is a {named}, which has no causal head."
        yield Problem(TORCH_MODEL, message, "Save a model that AutoModelForCausalLM loads.")
    safe = (files.WHOLE, files.INDEX)
    has = {name for name in (*safe, *PICKLED) if _size(roots, f"{folder.rstrip('/')}/{name}") is not None}
    if has and has.isdisjoint(safe):
        message = f"{folder} has only {min(has)}, and loading a pickle runs code."
        yield Problem(TORCH_MODEL, message, "Save it as safetensors, with save_pretrained of transformers.")


def _torch_vocabulary_size(trainer: TrainerSection, roots: AllowedRoots) -> int | None:
    """Return the number of tokens of a torch trainer's folder; None if its config.json does not say."""
    from orchestrator.models.huggingface import origin  # brings NumPy

    try:
        config = origin.taken(trainer.folder or "", roots).config
    except (AtollError, OSError):
        return None  # reported by ``weights_problems``
    size = trainer.settings.get("vocab_size", config.get("vocab_size"))
    return size if type(size) is int else None


def refuse_outside(spec: JobSpec, roots: AllowedRoots, *, begun: bool = False) -> None:
    """Raise InvalidJobSpec with every path that jobs may not use, and before the start with problems of the weights."""
    problems = problems_outside_roots(spec, roots, begun=begun)
    if problems := problems if begun else (*problems, *weights_problems(spec, roots)):
        raise InvalidJobSpec(detail="it names files that jobs may not use (any more)", problems=problems)


def _problems(spec: JobSpec, roots: AllowedRoots, begun: bool) -> Iterator[Problem]:
    named = [(FOLDER, spec.checkpoints.folder)] if spec.checkpoints.folder is not None else []
    if spec.resume is not None and not begun:
        named.append((CHECKPOINT, spec.resume.checkpoint))
    for field, url in named:
        try:
            _followed(roots.checkpoint_folder(url))
        except OutsideRoots as error:
            yield Problem(field, error.detail, error.remedy)
    for field, path in _data_files(spec):
        try:
            _followed(roots.data_file(path))
        except OutsideRoots as error:
            yield Problem(field, error.detail, error.remedy)


def _data_files(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield every data file that the specification names, with its field."""
    yield from ((f"{FILES}.{number}", path) for number, path in enumerate(spec.data.files))
    for index, source in enumerate(spec.data.sources):
        for field, paths in (("files", source.files), ("held_out", source.held_out)):
            for number, path in enumerate(paths):
                own = token_files.files_of(path) if spec.data.source == "tokens" else (path,)
                yield from ((f"data.sources.{index}.{field}.{number}", one) for one in own)
    if spec.data.tokenizer != BYTES:
        yield TOKENIZER_FIELD, spec.data.tokenizer
    if spec.data.template != tokenizer_file.AS_TOKENIZER:
        yield TEMPLATE, spec.data.template
    if spec.data.index is not None:
        yield INDEX, spec.data.index


UNSEEN_REMEDY = (
    "Copy the files to the same path on each machine, mount the folder there, or name them in an object store (s3://…)."
)
NODES_NAMED_MAX = 5


def unseen_problems(
    spec: JobSpec,
    roots: AllowedRoots,
    unseen_files: Callable[[Collection[str], Mapping[str, int | None]], Sequence[UnseenFile]],
) -> tuple[Problem, ...]:
    """Return a problem for each data file that a machine of the job's node groups does not see.

    If the file is on this machine as well, it must have the same size there.
    """
    groups = {section.node_group for section in spec.islands}
    if spec.evaluation.node_group is not None:
        groups.add(spec.evaluation.node_group)
    fields = {path: field for field, path in _data_files(spec) if "://" not in path}
    sizes = {path: _size(roots, path) for path in fields}
    unseen: dict[str, list[UnseenFile]] = {}
    for file in unseen_files(sorted(groups), sizes) if sizes else ():
        unseen.setdefault(file.path, []).append(file)
    weights, measures_in = spec.model.initial_weights, spec.evaluation.node_group
    readers = set() if measures_in is None or spec.resume is not None else {measures_in}
    readers = groups if has_frozen(spec) else readers
    if weights is not None and "://" not in weights and readers:
        configuration = f"{weights}/config.json"
        fields[configuration] = WEIGHTS
        for file in unseen_files(sorted(readers), {configuration: None}):
            unseen.setdefault(file.path, []).append(file)
    problems = []
    for path, files in unseen.items():
        nodes = [f"{file.node} of {file.group} ({file.reason})" for file in files]
        named = ", ".join(nodes[:NODES_NAMED_MAX]) + (
            f" and {more} more" if (more := len(nodes) - NODES_NAMED_MAX) > 0 else ""
        )
        problems.append(Problem(fields[path], f"{path} is not seen by {named}.", UNSEEN_REMEDY))
    return tuple(problems)


def _followed(there: Allowed) -> None:
    if there.local:
        there.real()


def with_tokenizer(spec: JobSpec, roots: AllowedRoots) -> JobSpec:
    """Return the specification with its tokenizer's digest, and with the tokens around a document filled in.

    These are chosen once, here: they depend on files beside the tokenizer's, which nodes may lack. Raises InvalidJobSpec.
    A file outside the roots is not reported here, but by ``problems_outside_roots``.
    """
    section, vocabulary_size = spec.data, BYTE_COUNT
    changes: dict[str, Any] = {}
    if section.tokenizer == BYTES:
        if section.begin_token == tokenizer_file.AS_TOKENIZER:
            changes = {"begin_token": tokenizer_file.NO_TOKEN}
    else:
        try:
            file = tokenizer_file.read(roots, section.tokenizer)
        except OutsideRoots:
            return spec
        except ConfigurationError as error:
            message = str(error).removeprefix(f"{TOKENIZER_FIELD}: ")
            raise InvalidJobSpec(
                problems=(Problem(TOKENIZER_FIELD, message, "Correct the path or the file."),)
            ) from error
        if section.tokenizer_digest not in (None, file.digest):
            message = f"is {section.tokenizer_digest}, but the file has {file.digest}."
            raise InvalidJobSpec(
                problems=(Problem(TOKENIZER_DIGEST, message, "Leave it out, or use the file with that digest."),)
            )
        around = tokenizer_file.around(file, section.separator, section.begin_token, section.tokenizer)
        if isinstance(around, Problem):
            raise InvalidJobSpec(problems=(around,))
        begin_token = tokenizer_file.NO_TOKEN if around.begin_token is None else around.begin_token
        changes = {"tokenizer_digest": file.digest, "separator": around.separator, "begin_token": begin_token}
        vocabulary_size = file.vocabulary_size
        if section.intra_document_masking and not section.has_tokens and around.separator not in file.never_text:
            message = f"is {around.separator:,}, an ordinary token of {section.tokenizer}, which a text may contain."
            remedy = "Name a control token, or leave data.intra_document_masking out."
            raise InvalidJobSpec(problems=(Problem("data.separator", message, remedy),))
        if section.has_conversations:
            changes["template_digest"] = _template_digest(spec, roots, file)
    model_size = spec.vocabulary_size if spec.trainer.folder is None else _torch_vocabulary_size(spec.trainer, roots)
    if model_size is not None and (message := tokenizer_file.misfit(vocabulary_size, model_size, section.tokenizer)):
        raise InvalidJobSpec(problems=(Problem(TOKENIZER_FIELD, message, tokenizer_file.MISFIT_REMEDY),))
    return spec.model_copy(update={"data": section.model_copy(update=changes)})


def _template_digest(spec: JobSpec, roots: AllowedRoots, file: tokenizer_file.TokenizerFile) -> str | None:
    """Return the digest of the job's chat template. Raises InvalidJobSpec for an invalid or an unexpected one."""
    section = spec.data
    try:
        template = chat_template.load(roots, section.template, section.tokenizer, file)
    except OutsideRoots:
        return section.template_digest  # reported elsewhere
    except ConfigurationError as error:
        problem = Problem(TEMPLATE, str(error).removeprefix(f"{TEMPLATE}: "), "Correct the path or the file.")
        raise InvalidJobSpec(problems=(problem,)) from error
    digest: str | None = None if template is None else template.digest
    if section.template_digest not in (None, digest):
        message = f"is {section.template_digest}, but the template has {digest}."
        remedy = "Leave it out, or use the template with that digest."
        raise InvalidJobSpec(problems=(Problem(f"{TEMPLATE}_digest", message, remedy),))
    return digest


def keep_tokenizer(run_dir: Path, spec: Mapping[str, Any], roots: AllowedRoots) -> None:
    """Copy the job's tokenizer into the run's folder, for exports after the file is gone. Raises InfrastructureError."""
    path, digest = _path_and_digest(spec)
    if path == BYTES:
        return
    try:
        with open_data(roots, path) as file:
            content = file.read(tokenizer_file.FILE_BYTES_MAX)
    except (OSError, ConfigurationError):
        return  # islands need the file, and report it
    if blake2b(content, digest_size=16).hexdigest() == digest:
        put(run_dir, TOKENIZER, content)


def tokenizer_of(job: str, run_dir: Path, spec: Any, roots: AllowedRoots) -> tuple[IO[bytes], int]:
    """Open a job's tokenizer as it was at submission, and return the file and its size. The caller closes it.

    The digest is computed piece by piece, to bound memory. ``spec`` is the stored specification. Raises NotFound if its
    tokens are bytes; Conflict if the file was changed or removed and the run's folder has no copy.
    """
    path, digest = _path_and_digest(spec)
    if path == BYTES:
        raise NotFound(detail=f"Job {job} has no tokenizer file: its tokens are bytes.")
    reason = ""
    copy, original = partial(open_below, run_dir, TOKENIZER), partial(open_data, roots, path)
    openings: tuple[Callable[[], IO[bytes]], ...] = (copy, original)  # earlier builds kept no copy
    for opening in openings:
        try:
            file = opening()
        except (OSError, ConfigurationError) as error:
            reason = f"{TOKENIZER_FIELD}: {path} cannot be read here ({first_line(error)})."
            continue
        size, digest_there = _measured(file)
        if digest_there == digest:
            file.seek(0)
            return file, size
        file.close()
        reason = f"{TOKENIZER_FIELD}: {path} has the digest {digest_there}, but job {job} was submitted with {digest}."
    remedy = "Restore the file that the job was submitted with, or use your own copy of it."
    raise Conflict(detail=reason, remedy=remedy)


def _measured(file: IO[bytes]) -> tuple[int, str]:
    """Return the file's size and digest. Nothing beyond the limit of a tokenizer's size is read."""
    size, digest = 0, blake2b(digest_size=16)
    while size <= tokenizer_file.FILE_BYTES_MAX and (piece := file.read(PIECE_BYTES)):
        size += len(piece)
        digest.update(piece)
    return size, digest.hexdigest()


def _path_and_digest(spec: Any) -> tuple[str, str | None]:
    data = spec.get("data") if isinstance(spec, Mapping) else None
    section = data if isinstance(data, Mapping) else {}
    path = section.get("tokenizer", BYTES)
    return path if isinstance(path, str) else BYTES, section.get("tokenizer_digest")
