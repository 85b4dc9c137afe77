"""What an export keeps of the checkpoint that a job continued: its context length, special tokens, and small files.

   {"folder": "/data/Qwen3-0.6B",               model.initial_weights
    "files": {"config.json": "…", …},           small files of the folder, as text: those of ``FILES`` that it has
    "tokenizers": {"tokenizer.json": "…"},      digests of its tokenizers, as data.tokenizer_digest
    "lost": {"chat_template.jinja": "…"}}       files that could not be kept, with the reason

The service reads it when the job starts and keeps it in the run's folder, so that an export does not need the checkpoint
any more. Tensors, and what is written where, are handled in ``export``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

from orchestrator.errors import ConfigurationError, DataError, OutsideRoots
from orchestrator.models.huggingface import configuration
from orchestrator.system.roots import AllowedRoots, open_data
from orchestrator.text.tokenizer_file import FILE_BYTES_MAX

CONFIG, GENERATION, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
OF_THE_TOKENIZER = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that are only meaningful with the tokenizer that they were published with."""
FILES = (CONFIG, GENERATION, *OF_THE_TOKENIZER)
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
ONE_FILE_BYTES_MAX = 4 << 20
"""Gemma's tokenizer_config.json has 1.2 MB."""
BYTES_MAX = 32 << 20
"""The limit of everything that is kept, as JSON."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a job continued; see the module."""

    folder: str
    files: Mapping[str, str] = field(default_factory=dict)
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> Mapping[str, Any]:
        """The fields of its config.json for the language model; empty if there are none."""
        return configuration.text_document(self.mapping(CONFIG))

    def mapping(self, name: str) -> dict[str, Any]:
        """Return the JSON object in one of its files; empty if there is none."""
        try:
            document = json.loads(self.files.get(name, "{}"))
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    def content(self) -> bytes:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False).encode()


def taken(folder: str, roots: AllowedRoots) -> Origin:
    """Return what the folder has now. Raises DataError if it has no readable config.json."""
    files, tokenizers, lost = dict[str, str](), dict[str, str](), dict[str, str]()
    for name in (*FILES, *TOKENIZERS):
        bytes_max = FILE_BYTES_MAX if name in TOKENIZERS else ONE_FILE_BYTES_MAX
        try:
            with open_data(roots, f"{folder.rstrip('/')}/{name}") as file:
                content = file.read(bytes_max + 1)
            if len(content) > bytes_max:
                lost[name] = f"it has more than {bytes_max >> 20} MiB"
            elif name in TOKENIZERS:
                tokenizers[name] = blake2b(content, digest_size=16).hexdigest()
            else:
                files[name] = content.decode()
        except FileNotFoundError:
            continue
        except (OSError, ConfigurationError, ValueError) as error:
            lost[name] = "it is outside the roots" if isinstance(error, OutsideRoots) else str(error)
    if CONFIG not in files:
        raise DataError(detail=f"{folder} has no readable {CONFIG} ({lost.get(CONFIG, 'there is none')}).")
    return Origin(folder, files, tokenizers, lost)


def parsed(content: bytes | str, name: str) -> Origin:
    """Return the origin in this document. Raises DataError if it is invalid."""
    try:
        document = json.loads(content)
        parts = [document[part] for part in ("files", "tokenizers", "lost")]
        texts = all(isinstance(key, str) and isinstance(text, str) for part in parts for key, text in part.items())
        if not texts or not isinstance(document["folder"], str):
            raise TypeError("a text was expected")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            detail=f"{name} is damaged: it does not describe the checkpoint that the job continued."
        ) from error
    files, tokenizers, lost = parts
    return Origin(document["folder"], {each: files[each] for each in FILES if each in files}, tokenizers, lost)
