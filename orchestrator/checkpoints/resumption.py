"""The resumption of a job: what it needs from the checkpoint at which it continues, stored with the job when it starts.

   RUN_DIR/resumed.json    the checkpoint, its manifest, and why newer ones were refused

The checkpoint itself is read once, when the job begins; a restarted synchroniser, and islands that are placed again, need
only this file. A checkpoint of another model, or of other data, is refused with every difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import MANIFEST_BYTES_MAX, Manifest, from_document, seal, unseal
from orchestrator.checkpoints.reading import newest_sound
from orchestrator.core.commands import ChangedSettings, Set
from orchestrator.core.saving import JobResumed, SavedIsland
from orchestrator.core.vocabulary import Instant, IslandId, Version
from orchestrator.errors import DataError
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import RESUMED, SPECIFICATION

BYTES_MAX = 2 * MANIFEST_BYTES_MAX
ROUTERS_APART = ("synchroniser", "router_interval_steps")
IS_SET = object()
"""In place of a value of which only that there is one must stay the same."""
"""Whether it is set decides how the model is cut, and its value does not."""
SAME = (
    ("trainer",),
    ("model", "preset"),
    ("model", "decoder"),
    ("model", "factory"),
    ("model", "settings"),
    ("model", "vocabulary_size"),
    ("model", "compute_dtype"),
    ("model", "weights_digest"),
    ("trainable", "lora", "rank"),
    ("trainable", "lora", "alpha"),
    ("trainable", "lora", "targets"),
    ("trainable", "only"),
    ("data", "source"),
    ("data", "files"),
    ("data", "sources"),
    ("data", "text_field"),
    ("data", "settings"),
    ("data", "samples"),
    ("data", "sequence_length"),
    ("data", "held_out_ratio"),
    ("data", "tokenizer"),
    ("data", "tokenizer_digest"),
    ("data", "separator"),
    ("data", "begin_token"),
    ("data", "index_digest"),
    ("seed",),
    ("training", "inner_optimizer", "kind"),
    ("training", "inner_optimizer", "factory"),
    ("synchroniser", "fragments"),
    ROUTERS_APART,
    ("synchroniser", "outer_optimizer", "kind"),
    ("synthetic", "parameters"),
)
"""The settings on which Θ, its fragments, the islands' states and the positions in the data depend."""
REASONS: Mapping[tuple[str, ...], str] = {
    ("model", "weights_digest"): " (what was trained only fits the frozen weights of model.initial_weights then)",
    ROUTERS_APART: " (the routers are a fragment of their own where it is set)",
}
"""What a difference means, where its field alone does not say it."""
CHANGEABLE: Mapping[str, tuple[str, ...]] = {
    "lr_ratio": ("training", "inner_optimizer", "lr"),
    "quorum": ("synchroniser", "quorum"),
    "grace_cap_steps": ("synchroniser", "grace_cap_steps"),
    "sync_interval_steps": ("synchroniser", "interval_steps"),
}
"""The settings that operators change in a running job, and their places in a specification. The limit of cost is not one:
it counts from the beginning of the resumed job."""
TOKENIZER, SOURCES = ("data", "tokenizer"), ("data", "sources")
LATER: Mapping[tuple[str, ...], Any] = {
    ("training", "inner_optimizer", "kind"): "adamw",
    SOURCES: [],
    ("data", "samples"): None,
    ("data", "settings"): {},
    TOKENIZER: "bytes",
    ("data", "begin_token"): "none",
    ("model", "settings"): {},
}
"""The values of these settings in specifications written before they existed. Others have none."""
LEFT_TO_IT: Mapping[tuple[str, ...], Any] = {("data", "separator"): None, ("data", "begin_token"): "tokenizer"}
"""The values that leave a setting to the tokenizer. The service fills these in, except in earlier builds and without a
service.

For bytes nothing is open: their separator is a newline, and they have no beginning.
"""


@dataclass(frozen=True, slots=True)
class Resumption:
    """The start of a resumed job. ``refused`` says why each newer checkpoint, or the requested one, is not used."""

    url: str
    manifest: Manifest
    refused: tuple[str, ...]

    @property
    def resumptions(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Block size, and cursors in blocks, of each resumption including this one (``learners.island_spec``)."""
        manifest = self.manifest
        block = math.gcd(*manifest.batch_sizes)
        drawn = zip(manifest.cursors, manifest.batch_sizes, strict=True)
        last = (block, tuple(cursor * size // block for cursor, size in drawn))
        return (*zip(manifest.granules, manifest.legs, strict=True), last)

    def folder(self, roots: AllowedRoots) -> Folder:
        """Return the checkpoint's folder. Raises OutsideRoots if jobs may no longer read there."""
        return Folder.within(roots, self.url)

    def settings(self, spec: Mapping[str, Any]) -> list[Set]:
        """Return the commands that bring back what operators had changed, one for each setting.

        A setting that ``spec`` has with another value than the specification of the checkpoint is as ``spec`` says.
        """
        changed, before = self.manifest.changed, self.manifest.spec
        names = (name for name, path in CHANGEABLE.items() if _at(before, path) == _at(spec, path))
        return commands_of(changed, names)

    def event(self, at: Instant, islands: frozenset[IslandId]) -> JobResumed:
        """Return the event with which the job begins, without islands that it no longer has."""
        manifest = self.manifest
        versions = tuple(Version(fragment.version) for fragment in manifest.fragments)
        saved = []
        for part in manifest.parts:
            work = zip(part.versions, versions, part.token_counts, strict=True)
            kept_tokens = tuple(tokens if adopted == version else 0 for adopted, version, tokens in work)
            saved.append(SavedIsland(IslandId(part.island), part.step, kept_tokens))
        return JobResumed(
            at,
            self.url,
            manifest.job,
            versions,
            tuple(fragment.step for fragment in manifest.fragments),
            manifest.tokens_trained,
            manifest.merged_tokens,
            tuple(island for island in saved if island.island in islands),
            self.refused,
        )


def commands_of(changed: ChangedSettings, names: Iterable[str]) -> list[Set]:
    """Return a command for each of these settings that was changed, so that one may be refused without the others."""
    values = ((name, getattr(changed, name)) for name in names)
    return [Set(**{name: value}) for name, value in values if value is not None]


def find(roots: AllowedRoots, url: str, spec: Mapping[str, Any]) -> Resumption:
    """Return the newest intact checkpoint at ``url`` for a job of this specification. Raises as ``newest_sound``."""
    sound = newest_sound(roots, url)
    if differing := differences(sound.manifest.spec, spec):
        detail = f"The checkpoint {sound.folder.url} belongs to another kind of job: {'; '.join(differing)}."
        raise DataError(detail=detail)
    return Resumption(sound.folder.url, sound.manifest, sound.refused)


def how_to_continue(job: str, run_dir: Path, newest_url: str | None) -> str:
    """Return the sentence for a job that failed: its newest checkpoint, and the command that starts a new job from it."""
    command = f"atoll submit {run_dir / SPECIFICATION}"
    if newest_url is None:
        return f"It has no checkpoint. Begin it anew with `{command}`."
    return f"Its newest checkpoint is {newest_url}. Continue from it with `{command} --resume {job}`."


def begun(roots: AllowedRoots, run_dir: Path, spec: Mapping[str, Any]) -> Resumption | None:
    """Return the resumption of the job in ``run_dir``, as chosen when it began. Raises DataError as ``find``."""
    resume = spec.get("resume")
    if resume is None:
        return None
    if (run_dir / RESUMED).exists():
        return stored(run_dir)
    resumption = find(roots, resume["checkpoint"], spec)
    with_refusals = replace(resumption, refused=(*resume["refused"], *resumption.refused))
    document = {
        "url": with_refusals.url,
        "refused": list(with_refusals.refused),
        "manifest": asdict(with_refusals.manifest),
    }
    Folder.own(run_dir).write(RESUMED, seal(document))
    return with_refusals


def stored(run_dir: Path) -> Resumption | None:
    """Return the resumption of the job in ``run_dir``, if it has one. Raises DataError if that file is damaged."""
    path = run_dir / RESUMED
    if not path.exists():
        return None
    document = unseal(Folder.own(run_dir).read(RESUMED, BYTES_MAX), str(path))
    url, refused = document.get("url"), document.get("refused")
    if (
        not isinstance(url, str)
        or not isinstance(refused, list)
        or not all(isinstance(reason, str) for reason in refused)
    ):
        raise DataError(detail=f"{path} is damaged: it does not contain a resumption.")
    return Resumption(url, from_document(document.get("manifest"), str(path)), tuple(refused))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that have changed and must not, in words."""
    lines = []
    for path in SAME:
        was, is_now = (_at(document, path) for document in (before, now))
        is_open = any(_is_left(document, path) and not _is_of_bytes(document) for document in (before, now))
        if was != is_now and not is_open:
            lines.append(f"{'.'.join(path)} was {_said(was)} but is {_said(is_now)}{REASONS.get(path, '')}")
    return lines


def _said(value: Any) -> str:
    if value is None:
        return "not set"
    return "set" if value is IS_SET else brief(value)


def _at(document: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = document
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    if path == SOURCES and isinstance(value, list):  # the files are compared, not where their names came from
        value = [{key: each[key] for key in each if key != "hub"} for each in value]
    if path == ROUTERS_APART:
        return None if value is None else IS_SET
    if value is None or (path in LEFT_TO_IT and value == LEFT_TO_IT[path] and _is_of_bytes(document)):
        return LATER.get(path)
    return value


def _is_left(document: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    return path in LEFT_TO_IT and _at(document, path) == LEFT_TO_IT[path]


def _is_of_bytes(document: Mapping[str, Any]) -> bool:
    return bool(_at(document, TOKENIZER) == LATER[TOKENIZER])
