"""The sources of a job's data: their section of the specification, and the files of those that are on the Hugging Face Hub.

``with_hub_files`` replaces a data set's id by a list of files when a job is submitted, so that every island, and a restarted
job, reads the same files whatever is published later. Islands read them from the Hub by URLs with the commit, below a root.
Without a network the files come from a folder with copies:

    MIRROR/datasets--OWNER--NAME/snapshots/COMMIT/…      the cache of Hugging Face's libraries (`hf download`)
    MIRROR/OWNER/NAME/…                                  a plain copy, which has no commit

The data set's README names configs and splits, by patterns of files. Without that, names of folders and files tell the
splits. Responsible for names only: ``data_check`` opens files. Source: the repository structure that Hugging Face's library
`datasets` documents.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import Field, model_validator

from orchestrator.errors import AtollError, ConfigurationError, InvalidJobSpec, OutsideRoots, Problem, first_line
from orchestrator.specification.bounds import (
    DatasetId,
    Digest,
    Location,
    Name,
    Revision,
    Section,
    SourceWeight,
    Word,
)
from orchestrator.system.plain import some_of
from orchestrator.system.roots import AllowedRoots, hub_endpoint, hub_headers, open_data, place_of, shown
from orchestrator.text import file_kinds, token_files

FILES_MAX = 10_000
"""Of a data set: an island opens each to count its lines. More are fewer files if they are put together."""
LISTED_MAX = 200_000
CARD_BYTES_MAX = 1 << 20
ANSWER_S, ANSWER_BYTES_MAX, REDIRECTS_MAX = 20.0, 16 << 20, 5
DEFAULT_REVISION = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CARD = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", re.DOTALL)
_SHARD = re.compile(r"data/([\w.]+)-\d{5}-of-\d{5}[^/]*")
_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
_SPLIT_WORDS = {split: re.compile(rf"(?:^|[-._ 0-9])(?:{words})(?:[-._ 0-9]|$)") for split, words in _WORDS.items()}
_NO_DATA = frozenset(
    ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "dummy_data.zip")
)
_LISTED_ENDINGS = re.compile(
    r"\.(jsonl|json|ndjson|jsonlines|txt|parquet|parq|pq|arrayrecord|array_record)(\.(gz|gzip|zst|zstd))?",
    re.IGNORECASE,
)


class HubSection(Section):
    """A data set of the Hugging Face Hub. ``hub: owner/name`` is short for ``hub: {dataset: owner/name}``.

    The service finds the files of ``split`` when the job is submitted, and islands read them from the Hub, which must be a
    root of the service (`atoll up --data URL`). With ``mirror`` they are read from a folder with OWNER/NAME in it, or a
    cache of Hugging Face's libraries. Every node needs the same folder, below a root.
    """

    dataset: DatasetId
    config: Word | None = Field(default=None, description="if absent, the only one, or the data set's default")
    split: Word = "train"
    held_out_split: Word | None = Field(default=None, description="files for the source's held-out loss")
    revision: Revision = Field(default=DEFAULT_REVISION, description="a branch, a tag or a commit")
    mirror: Location | None = Field(default=None, description="a folder with copies; if absent, the Hub (HF_ENDPOINT)")
    commit: Digest | None = Field(
        default=None, description="the commit whose files the job reads; none of a plain copy; filled in by the service"
    )
    files_digest: Digest | None = Field(
        default=None, description="digest of this section and the names of its files; filled in by the service"
    )

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, data: Any) -> Any:
        return {"dataset": data} if isinstance(data, str) else data

    def digest_of(self, files: Iterable[str], held_out: Iterable[str]) -> str:
        """Return the digest of this section with these files."""
        section = self.model_dump(exclude={"files_digest"})
        return blake2b(
            repr((sorted(section.items()), *map(tuple, (files, held_out)))).encode(), digest_size=8
        ).hexdigest()


class SourceSection(Section):
    """One kind of text of a streamed data set. ``weight`` is its share of all sequences, relative to the other weights.

    A file's name determines how it is read, regardless of case: .jsonl, .json, .ndjson and .jsonlines are JSON Lines (one
    object per line), .parquet is Parquet, .arrayrecord is ArrayRecord (one text per record), and everything else is UTF-8
    text. JSON Lines and text may be compressed: .gz, .gzip, .zst, .zstd. A file is refused if its content does not match
    its name. In Parquet and JSON the text is in ``text_field``. With ``data.source: tokens``, the tokens of Parquet are in
    ``token_field``.

    The part of a file's name after the last slash may be a pattern with ``*``, ``?`` and ``[…]``, except in a store. The
    service replaces it by the files that it finds when the job is submitted, and ``hub`` by the files of that data set.
    Without ``held_out``, the share ``data.held_out_ratio`` of the text is held out.
    """

    name: Name
    files: Annotated[tuple[Location, ...], Field(max_length=FILES_MAX)] = ()
    hub: HubSection | None = Field(default=None, description="a data set of the Hugging Face Hub, in place of files")
    held_out: Annotated[tuple[Location, ...], Field(max_length=FILES_MAX)] = Field(
        default=(), description="files for the source's held-out loss; no island trains on them"
    )
    weight: SourceWeight = 1.0
    text_field: Word = "text"
    token_field: Word = Field(
        default="input_ids", description="for source: tokens; a Parquet file's column of lists of integers"
    )

    @model_validator(mode="after")
    def _files_or_hub(self) -> SourceSection:
        hub = self.hub
        if hub is None:
            if not self.files:
                raise ValueError("has no files; list them in files, or name a data set in hub")
        elif hub.files_digest is None:
            if hub.commit is not None:
                raise ValueError("has hub.commit, which the service fills in; set hub.revision to it instead")
            if self.files:
                raise ValueError("has files and hub, which are two sources; make two of it, or leave one out")
            if self.held_out and hub.held_out_split is not None:
                raise ValueError("has held_out and hub.held_out_split; leave one of the two out")
        elif hub.files_digest != hub.digest_of(self.files, self.held_out):
            raise ValueError(
                "has files of another hub section than this one; remove files, held_out, hub.commit and hub.files_digest, "
                "and the service looks for them again"
            )
        return self


@dataclass(frozen=True, slots=True)
class _Listing:
    """The files of a data set: their names in it, the path or URL before each name, its README, and the commit if known."""

    names: tuple[str, ...]
    before: str
    card: str
    commit: str | None


class _Refused(Exception):
    """A field of ``hub``, what is wrong with it, and the remedy."""

    def __init__(self, field: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.problem = Problem(field, message, remedy)


def with_hub_files(source: SourceSection, roots: AllowedRoots, path: str, *, is_tokens: bool) -> SourceSection:
    """Return the source with the files of its data set. A source without one, or whose files are known, is left unchanged.

    ``path`` is that of the source in the specification. Raises InvalidJobSpec.
    """
    hub = source.hub
    if hub is None or hub.files_digest is not None:
        return source
    try:
        listing = _published(hub, roots) if hub.mirror is None else _mirrored(hub, hub.mirror, roots)
        splits = _splits(hub, listing, is_tokens)
        files = _of_split(hub, splits, "split", hub.split, listing, is_tokens)
        held_out = source.held_out
        if hub.held_out_split is not None:
            held_out = _of_split(hub, splits, "held_out_split", hub.held_out_split, listing, is_tokens)
        if hub.mirror is None:
            _refuse_gated(hub, files[0])
    except _Refused as refused:
        problem = refused.problem
        raise InvalidJobSpec(
            problems=(Problem(f"{path}.hub.{problem.path}", problem.message, problem.remedy),)
        ) from None
    pinned = hub.model_copy(update={"commit": listing.commit})
    pinned = pinned.model_copy(update={"files_digest": pinned.digest_of(files, held_out)})
    return source.model_copy(update={"files": files, "held_out": held_out, "hub": pinned})


# ── the Hub ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _published(hub: HubSection, roots: AllowedRoots) -> _Listing:
    endpoint = hub_endpoint()
    home = f"{endpoint}/datasets/{hub.dataset}"
    try:
        roots.data_file(home)
    except OutsideRoots as error:
        message = f"is {hub.dataset}, at {error.detail.removesuffix('.')}."
        remedy = f"Set mirror to a folder with a copy, or restart the service with `atoll up --data {endpoint}`."
        raise _Refused("dataset", message, remedy) from None
    interface = f"{endpoint}/api/datasets/{hub.dataset}"
    commit = _value(hub, f"{interface}/revision/{quote(hub.revision, safe='')}", dict)[0].get("sha")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise _Refused("dataset", f"is {hub.dataset}, of which {endpoint} names no commit.", "Correct HF_ENDPOINT.")
    names: list[str] = []
    page: str | None = f"{interface}/tree/{commit}?recursive=true&expand=false"
    while page is not None:
        entries, page = _value(hub, page, list)
        files = (entry for entry in entries if isinstance(entry, dict) and entry.get("type") == "file")
        names += [entry["path"] for entry in files if isinstance(entry.get("path"), str)]
        if len(names) > LISTED_MAX:
            message = f"is {hub.dataset}, which has more than {LISTED_MAX:,} files."
            raise _Refused("dataset", message, "List the files of the job in files.")
    before = f"{home}/resolve/{commit}"
    for name in names:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise _Refused("dataset", f"is {hub.dataset}, with the file {shown(name)}.", "Name another data set.")
    card = _answer(hub, f"{before}/README.md")[0].decode("utf-8", "replace") if "README.md" in names else ""
    return _Listing(tuple(sorted(names)), before, card, commit)


def _value(hub: HubSection, url: str, kind: type[Any]) -> tuple[Any, str | None]:
    """Return the data that the Hub answers, of this kind, and the URL of the next page."""
    content, following = _answer(hub, url)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        message = f"is {hub.dataset}, of which {hub_endpoint()} does not answer as the Hub does."
        raise _Refused("dataset", message, "Correct HF_ENDPOINT, or set mirror.")
    return value, following


def _answer(hub: HubSection, url: str, method: str = "GET") -> tuple[bytes, str | None]:
    """Return the answer to a request, and the URL of the next page. Only URLs of the endpoint are requested."""
    import httpx  # only the service's machine needs it

    endpoint = httpx.URL(hub_endpoint())
    at = httpx.URL(url)
    try:
        with httpx.Client(timeout=ANSWER_S, headers=hub_headers(), trust_env=False, follow_redirects=False) as client:
            for _ in range(REDIRECTS_MAX):
                with client.stream(method, at) as response:
                    if response.has_redirect_location and method == "GET":
                        at = _of_endpoint(hub, endpoint, at.join(response.headers["Location"]))
                        continue
                    if response.status_code >= 400:
                        raise _refusal(hub, response.status_code, response.headers.get("X-Error-Code", ""))
                    content = b""
                    for part in response.iter_bytes():
                        content += part
                        if len(content) > ANSWER_BYTES_MAX:
                            message = f"is {hub.dataset}, of which an answer has more than {ANSWER_BYTES_MAX:,} bytes."
                            raise _Refused("dataset", message, "Set mirror to a folder with a copy.")
                    following = response.links.get("next", {}).get("url")
                    return content, None if following is None else str(_of_endpoint(hub, endpoint, at.join(following)))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        message = f"is {hub.dataset}, but {endpoint} does not answer ({first_line(error) or type(error).__name__})."
        raise _Refused("dataset", message, "Check the network, or set mirror to a folder with a copy.") from None
    raise _Refused("dataset", f"is {hub.dataset}, which {endpoint} redirects in a circle.", "Correct its name.")


def _of_endpoint(hub: HubSection, endpoint: Any, url: Any) -> Any:
    """Return the URL. Raises _Refused for one of another server, which the operator has not allowed."""
    if (url.scheme, url.host, url.port) != (endpoint.scheme, endpoint.host, endpoint.port):
        message = f"is {hub.dataset}, for which {endpoint} refers to another server, {url.host}."
        raise _Refused("dataset", message, "Correct HF_ENDPOINT, or set mirror.")
    return url


def _refusal(hub: HubSection, status: int, code: str) -> _Refused:
    """Return the refusal for an answer of the Hub, which hides private data sets behind 401."""
    is_known = "HF_TOKEN has no access" if hub_headers() else "no HF_TOKEN is set"
    remedy = "Accept its conditions on its page, set HF_TOKEN for the service, and add `--pass-environment HF_TOKEN`."
    if code == "RevisionNotFound":
        return _Refused("revision", f"is {hub.revision}, which {hub.dataset} does not have.", "Correct it.")
    if code == "GatedRepo" or status == 403:
        return _Refused("dataset", f"is {hub.dataset}, which is gated, and {is_known} ({status}).", remedy)
    if status in (401, 404):
        message = f"is {hub.dataset}, which {hub_endpoint()} does not have or does not show, and {is_known} ({status})."
        return _Refused("dataset", message, f"Correct the name. If it is private or gated: {remedy}")
    remedy = "Submit the job again later, or set mirror to a folder with a copy."
    return _Refused("dataset", f"is {hub.dataset}, for which {hub_endpoint()} answers {status}.", remedy)


def _refuse_gated(hub: HubSection, url: str) -> None:
    """Raise _Refused if a file may not be read: the Hub lists the files of a gated data set for all."""
    _answer(hub, url, "HEAD")


# ── a folder with copies ──────────────────────────────────────────────────────────────────────────────────────────────


def _mirrored(hub: HubSection, mirror: str, roots: AllowedRoots) -> _Listing:
    owner, name = hub.dataset.split("/")
    cached = f"{mirror.rstrip('/')}/datasets--{owner}--{name}"
    folder, commit = f"{mirror.rstrip('/')}/{hub.dataset}", None
    try:
        if _folder(roots, cached) is not None:
            commit = _commit_of(hub, cached, roots)
            folder = f"{cached}/snapshots/{commit}"
        elif hub.revision != DEFAULT_REVISION and _folder(roots, folder) is not None:
            message = f"is {hub.revision}, but {shown(folder)} is a plain copy, which does not say its revision."
            raise _Refused("revision", message, "Leave revision out, or download into a cache: `hf download`.")
        real = _folder(roots, folder)
        if real is None:
            message = f"is {shown(mirror)}, where neither {hub.dataset} nor datasets--{owner}--{name} is a folder."
            remedy = f"Copy it there: `hf download {hub.dataset} --repo-type dataset --local-dir MIRROR/{hub.dataset}`."
            raise _Refused("mirror", message, remedy)
        names = tuple(sorted(_walked(real)))
        try:
            with open_data(roots, f"{folder}/README.md") as file:
                card = file.read(CARD_BYTES_MAX).decode("utf-8", "replace")
        except FileNotFoundError:
            card = ""
    except AtollError as error:
        detail = str(getattr(error, "detail", "") or error)
        raise _Refused("mirror", f"is refused: {detail}", str(getattr(error, "remedy", ""))) from None
    except OSError as error:
        message = f"is {shown(mirror)}, which cannot be read ({error.strerror or first_line(error)})."
        raise _Refused("mirror", message, "Correct the path, or its permissions.") from None
    return _Listing(names, folder, card, commit)


def _folder(roots: AllowedRoots, path: str) -> Path | None:
    allowed = roots.data_file(path)
    if not allowed.local:
        raise _Refused("mirror", f"is {shown(path)}, which is in a store.", "Name a folder that every node has.")
    real = allowed.real()
    return real if real.is_dir() else None


def _commit_of(hub: HubSection, cached: str, roots: AllowedRoots) -> str:
    """Return the commit of a revision in a cache, whose files are here."""
    if _COMMIT.fullmatch(hub.revision):
        commit = hub.revision
    else:
        try:
            with open_data(roots, f"{cached}/refs/{hub.revision}") as file:
                commit = file.read(100).decode("ascii", "replace").strip()
        except FileNotFoundError:
            commit = ""
    if not _COMMIT.fullmatch(commit) or _folder(roots, f"{cached}/snapshots/{commit}") is None:
        message = f"is {hub.revision}, which {shown(cached)} does not have."
        remedy = f"Download it: `hf download {hub.dataset} --repo-type dataset --revision {hub.revision}`."
        raise _Refused("revision", message, remedy)
    return commit


def _walked(real: Path) -> Iterator[str]:
    """Yield the names of the folder's files, except hidden ones, which are no data. Links to folders are not followed."""
    count = 0

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(real, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        count += len(files)
        if count > LISTED_MAX:
            message = f"is a folder with more than {LISTED_MAX:,} files of the data set."
            raise _Refused("mirror", message, "Copy only what the job reads.")
        inner = os.path.relpath(folder, real)
        yield from (name if inner == "." else f"{inner}/{name}" for name in files if not name.startswith("."))


# ── configs and splits ────────────────────────────────────────────────────────────────────────────────────────────────

Splits = Mapping[str, Sequence[str]]


def _splits(hub: HubSection, listing: _Listing, is_tokens: bool) -> Splits:
    """Return the names of the files of each split of the section's config."""
    names = [name for name in listing.names if not any(part.startswith(("__", ".")) for part in name.split("/"))]
    configs = _configs(listing.card)
    if not configs:
        base = ""
        if hub.config not in (None, "default"):
            base = f"{hub.config}/"
            if not any(name.startswith(base) for name in names):
                folders = sorted({name.split("/")[0] for name in names if "/" in name})
                remedy = f"Name one of its folders: {some_of(folders)}." if folders else "Leave config out."
                message = (
                    f"is {hub.config}, but the README of {hub.dataset} names no configs, and no folder is called so."
                )
                raise _Refused("config", message, remedy)
        return _by_names([name for name in names if name.startswith(base)], base, is_tokens)
    config = _chosen(hub, configs)
    base = _base(config.get("data_dir"))
    inside = [name for name in names if name.startswith(base)]
    patterns = _patterns(config.get("data_files"))
    if patterns is None:
        return _by_names(inside, base, is_tokens)
    return {split: _matching(inside, base, each) for split, each in patterns.items()}


def _configs(card: str) -> list[Mapping[str, Any]]:
    """Return the configs that a README's metadata names, those that can be read as such."""
    from orchestrator.specification.documents import read_yaml  # brings a parser, which islands do not need

    matched = _CARD.match(card)
    if matched is None:
        return []
    try:
        metadata = read_yaml(matched.group(1), name="README.md")
    except ConfigurationError:
        return []  # names of folders and files are used, as the Hub itself does
    configs = metadata.get("configs") if isinstance(metadata, dict) else None
    return [each for each in configs if isinstance(each, dict)] if isinstance(configs, list) else []


def _chosen(hub: HubSection, configs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    by_name = {str(each.get("config_name", "default")): each for each in configs}
    if hub.config is not None and hub.config in by_name:
        return by_name[hub.config]
    names = some_of(by_name)
    if hub.config is not None:
        raise _Refused("config", f"is {hub.config}, which {hub.dataset} does not have.", f"Name one of: {names}.")
    defaults = [each for each in configs if each.get("default") is True]
    if len(by_name) == 1 or defaults:
        return (defaults or list(configs))[0]
    if "default" in by_name:
        return by_name["default"]
    raise _Refused("config", f"is absent, but {hub.dataset} has {len(by_name):,} configs.", f"Name one of: {names}.")


def _base(data_dir: Any) -> str:
    base = data_dir.strip("/").removeprefix("./") if isinstance(data_dir, str) else ""
    return f"{base}/" if base not in ("", ".") else ""


def _patterns(data_files: Any) -> dict[str, list[str]] | None:
    """Return the patterns of each split, of all the ways in which a README may give them; None if it gives none."""
    if isinstance(data_files, str):
        return {"train": [data_files]}
    if isinstance(data_files, dict):
        return {str(split): _texts(patterns) for split, patterns in data_files.items()}
    if not isinstance(data_files, list) or not data_files:
        return None
    by_split: dict[str, list[str]] = {}
    for each in data_files:
        split, path = (each.get("split", "train"), each.get("path")) if isinstance(each, dict) else ("train", each)
        by_split.setdefault(str(split), []).extend(_texts(path))
    return by_split


def _texts(value: Any) -> list[str]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def _matching(names: Sequence[str], base: str, patterns: Sequence[str]) -> list[str]:
    import fsspec  # slow to import, and most sources are no data sets of the Hub

    matched: dict[str, None] = {}
    for pattern in patterns:
        fits = re.compile(fsspec.utils.glob_translate(base + pattern.removeprefix("./").lstrip("/")))
        matched |= dict.fromkeys(name for name in names if fits.match(name))
    return list(matched)


def _by_names(names: Sequence[str], base: str, is_tokens: bool) -> Splits:
    """Return the files of each split by the words in names of shards, else of folders, else of files; else all are train."""
    data = [name for name in names if name.rsplit("/", 1)[-1] not in _NO_DATA]
    readable = [name for name in data if _is_data(name, is_tokens)]
    data = readable or data  # the first of the others says why it is not read
    shards: dict[str, list[str]] = {}
    for name in data:
        if matched := _SHARD.fullmatch(name.removeprefix(base)):
            shards.setdefault(matched.group(1), []).append(name)
    if shards:
        return shards
    for by_folder in (True, False):
        splits: dict[str, list[str]] = {}
        for name in data:
            *folders, file = name.removeprefix(base).split("/")
            for split, words in _SPLIT_WORDS.items():
                if any(words.search(part) for part in (folders if by_folder else (file,))):
                    splits.setdefault(split, []).append(name)
        if splits:
            return splits
    return {"train": data} if data else {}


def _is_data(name: str, is_tokens: bool) -> bool:
    if is_tokens:
        return token_files.refusal(name) is None
    matched = _LISTED_ENDINGS.search(name)
    return matched is not None and matched.end() == len(name)


def _of_split(
    hub: HubSection, splits: Splits, field: str, split: str, listing: _Listing, is_tokens: bool
) -> tuple[str, ...]:
    names = splits.get(split, ())
    if not names:
        others = some_of([name for name, files in splits.items() if files])
        of = hub.dataset if hub.config is None else f"{hub.dataset}'s config {hub.config}"
        remedy = f"Name one of: {others}." if others else "Name another data set, or list its files."
        raise _Refused(field, f"is {split}, of which {of} has no files.", remedy)
    if len(names) > FILES_MAX:
        message = f"is {split}, of which {hub.dataset} has {len(names):,} files, but a source may have {FILES_MAX:,}."
        raise _Refused(field, message, "Name a config with fewer, or join files.")
    for name in names:
        path = f"{listing.before}/{name}"
        if "://" in path:
            try:
                place_of(path, "data")
            except ConfigurationError as error:
                message = f"is {split}, with the file {shown(name)}, which cannot be read by its URL: {error.detail}."
                raise _Refused(field, message, "Set mirror to a folder with a copy.") from None
        if refused := token_files.refusal(path) if is_tokens else file_kinds.refusal(path):
            raise _Refused(field, f"is {split}, with the file {shown(name)}, which {refused.message}.", refused.remedy)
    return tuple(f"{listing.before}/{name}" for name in names)
