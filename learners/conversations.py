"""Conversations as rows of tokens: each token with its weight in the loss, several conversations packed into a row.

    record ─▶ template (``orchestrator.text.chat_template``) ─▶ tokens ─▶ rows of sequence_length + 1 ─▶ ``Batch``

A row holds whole conversations, one after another, and padding at its end. A pair of a preference is two conversations, the
chosen one first, which stay together. Rows are the unit in which ``corpus`` and
``streaming`` keep and draw text, as one array of int32: the low bits are a token, the high ones say whether it is learned,
begins a conversation, or is padding. ``batch_of`` turns rows into a batch.

A conversation goes into the first row that has room, of the ``OPEN_ROWS`` youngest rows. Packing depends only on the
conversations of a piece and their order, so it is the same wherever a piece is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from learners.contract import Batch
from learners.streaming.documents import Continuation, Unreadable
from learners.tokenizer import FromFile, Tokenizer
from orchestrator.errors import ConfigurationError
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import AllowedRoots, shown
from orchestrator.text import chat_template
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.text_records import NotText

LEARNED, FIRST, PADDING = 1 << 30, 1 << 29, 1 << 28
"""Marks: a token counts in the loss; it begins a conversation; there is no token."""
TOKEN = PADDING - 1
OPEN_ROWS = 64
SHOWN_CHARACTERS = 60
TOO_LONG = "Raise data.sequence_length, or set data.long_conversations to skip or cut"

Refuse = Callable[[bytes, str], None]
"""Counts a conversation that cannot be trained on, with the reason. Raises if there are too many."""


@dataclass(frozen=True)
class Conversations:
    """Turns conversations, as ``text_records.conversation_of`` writes them, into rows of ``width`` marked tokens.

    A ``learners.tokenizer.Tokenizer`` whose ``encode`` marks tokens; of a conversation that cannot be trained on there are
    none.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    section: DataSection
    digest: str
    refuse: Refuse

    dtype = np.int32
    separator = PADDING
    beginning = np.zeros(0, np.int32)

    @property
    def vocabulary_size(self) -> int:
        return self.tokenizer.vocabulary_size

    @property
    def width(self) -> int:
        return self.section.sequence_length + 1

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [self._encoded(text) for text in texts]

    def counts(self, texts: Sequence[bytes]) -> list[int]:
        return [len(tokens) for tokens in self.encode(texts)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([token & TOKEN for token in tokens if not token & PADDING])

    def packed(self, texts: Sequence[bytes]) -> np.ndarray:
        """Return the rows of these conversations, one after another: (rows · width,) int32."""
        conversations = [tokens for tokens in self.encode(texts) if len(tokens)]
        rows, left = list[list[np.ndarray]](), list[int]()
        for tokens in conversations:
            first = max(0, len(rows) - OPEN_ROWS)
            at = next((at for at in range(first, len(rows)) if left[at] >= len(tokens)), len(rows))
            if at == len(rows):
                rows.append([])
                left.append(self.width)
            rows[at].append(tokens)
            left[at] -= len(tokens)
        packed = np.full((len(rows), self.width), PADDING, np.int32)
        for row, parts in zip(packed, rows, strict=True):
            tokens = np.concatenate(parts)
            row[: len(tokens)] = tokens
        return packed.reshape(-1)

    def _encoded(self, text: bytes) -> np.ndarray:
        conversation = json.loads(text)
        sides = [conversation[name] for name in ("chosen", "rejected") if name in conversation] or [conversation]
        try:
            parts = [self._marked(side) for side in sides]
            length = sum(map(len, parts))
            if length > self.width:
                if self.section.long_conversations == "refuse":
                    raise NotText(f"has {length:,} tokens, more than a row of {self.width:,}. {TOO_LONG}")
                first = parts[0][: self.width]
                is_cut = self.section.long_conversations == "cut" and (first & LEARNED).any()
                return first if is_cut else first[:0]
        except NotText as error:
            self.refuse(text, str(error))
            return np.zeros(0, np.int32)
        return np.concatenate(parts)

    def _marked(self, conversation: dict[str, Any]) -> np.ndarray:
        """Return marked tokens, (length,) int32. Raises NotText."""
        tokens, learned = self._tokens(conversation)
        if not learned.any():
            raise NotText("has no answer with text, so there is nothing to learn")
        marked: np.ndarray = (tokens | np.where(learned, LEARNED, 0)).astype(np.int32)
        marked[:1] |= FIRST
        return marked

    def _tokens(self, conversation: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (length,) int32, and which of them are learned (length,) bool."""
        if "completion" in conversation:
            tokens, learned = self._completion(conversation["prompt"], conversation["completion"])
        else:
            tokens, learned = self._rendered(conversation)
        return tokens, np.ones_like(learned) if self.section.loss_on == "all" else learned

    def _completion(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        """The completion continues the prompt's text, and the token that ends a text ends it."""
        own = self.tokenizer
        before, after = own.encode([prompt.encode()])[0], own.encode([Continuation(completion.encode())])[0]
        parts = (own.beginning, before, after, np.array([own.separator]))
        tokens = np.concatenate([part.astype(np.int32) for part in parts])
        return tokens, np.arange(len(tokens)) >= len(own.beginning) + len(before)

    def _rendered(self, conversation: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        if self.template is None or not isinstance(self.tokenizer, FromFile):
            section = self.section
            raise ConfigurationError(detail=str(chat_template.missing(section.template, section.tokenizer)))
        rendered = self.template.checked(conversation)
        tokens, places = self.tokenizer.disguised(rendered.text)
        learned = np.zeros(len(tokens), bool)
        for start, end in rendered.answers:
            learned |= (places[:, 0] < end) & (places[:, 1] > start)
        return tokens, learned


def load(section: DataSection, roots: AllowedRoots, tokenizer: Tokenizer) -> Conversations:
    """Return what turns the conversations of a ``data`` section into rows. Raises ConfigurationError, OutsideRoots."""
    template = None
    if isinstance(tokenizer, FromFile):
        template = chat_template.load(roots, section.template, section.tokenizer, tokenizer.file)
    has = None if template is None else template.digest
    if section.template_digest not in (None, has):
        where = f"data.template: {shown(section.template)} of {shown(section.tokenizer)}"
        detail = f"{where} has the digest {has} here, but {section.template_digest} where the job was submitted."
        raise ConfigurationError(detail=f"{detail} Every node must have the same template and tokenizer_config.json.")
    of = (has, section.loss_on, section.long_conversations, section.sequence_length)
    digest = blake2b(repr((tokenizer.digest, *of)).encode(), digest_size=16).hexdigest()

    def refuse(text: bytes, reason: str) -> None:
        raise ConfigurationError(detail=f"data: {named_by(text)} {reason}.")

    return Conversations(tokenizer, template, section, digest, refuse)


def counting_in(tokenizer: Tokenizer, unreadable: Unreadable) -> Tokenizer:
    """Return the tokenizer such that a conversation that cannot be trained on counts as unreadable, up to the limit."""

    def refuse(text: bytes, reason: str) -> None:
        unreadable.add("data", int.from_bytes(blake2b(text, digest_size=8).digest()), named_by(text), f"it {reason}")

    return replace(tokenizer, refuse=refuse) if isinstance(tokenizer, Conversations) else tokenizer


def named_by(text: bytes) -> str:
    """Return words for a conversation: how it begins."""
    value = json.loads(text)
    value = value.get("chosen", value)
    first = value["prompt"] if "prompt" in value else value["messages"][0].get("content")
    shortened = first if isinstance(first, str) else json.dumps(first)
    return f"the conversation that begins with {shortened[:SHOWN_CHARACTERS]!r}"


def batch_of(rows: np.ndarray) -> Batch:
    """Return rows of marked tokens, (rows, width) int32, as a batch of the same shape."""
    is_token = (rows & PADDING) == 0
    segments, positions = (np.where(is_token, each, 0) for each in _documents((rows & FIRST) != 0))
    return Batch(
        np.where(is_token, rows & TOKEN, 0).astype(np.int32),
        ((rows & LEARNED) != 0).astype(np.float32),
        segments,
        positions,
    )


def segmented(rows: np.ndarray, separator: int | None, begin_token: int | None = None) -> Batch:
    """Return rows of text, (rows, width) int32, as a batch in which each document is a segment.

    A document begins at a mark, and behind the ``separator``: there with the ``begin_token``, if documents have one, which
    may be the same token. What a row begins with is its first segment.
    """
    tokens = rows & TOKEN
    begins = (rows & FIRST) != 0
    begins[:, 0] = True
    if separator is not None:
        starts = True if begin_token is None else tokens[:, 1:] == begin_token
        begins[:, 1:] |= (tokens[:, :-1] == separator) & starts
    return Batch(tokens, None, *_documents(begins))


def _documents(begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return segments and positions of tokens, by which of them begin a document: (rows, width) int32 each."""
    place = np.arange(begins.shape[1])
    positions = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    return np.cumsum(begins, axis=1).astype(np.int32), positions.astype(np.int32)


def learned_tokens(marked: np.ndarray) -> np.ndarray:
    """Return the tokens that are learned: one-dimensional."""
    tokens: np.ndarray = marked[(marked & LEARNED) != 0] & TOKEN
    return tokens
