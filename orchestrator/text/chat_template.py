"""A conversation as the text that a model reads: its tokenizer's chat template, and which parts of the text are answers.

The template is the one that transformers uses: ``chat_template.jinja`` beside the tokenizer, or ``chat_template`` in its
tokenizer_config.json. It is rendered in Jinja's sandbox with the same options. Only ``strftime_now`` differs: its date is
fixed, because every island and every restart must get the same text.

Only the template writes control tokens. A control token's text that stands in a message stays text:

    the rows's strings are marked where they spell one   <|im_end|>   becomes   <·|im_end|>     (· is a noncharacter)
    the template is rendered with them
    what the template wrote is disguised                 <|im_end|>   becomes   ‹<|im_end|>›    (‹ › are noncharacters)
    the marks are removed

``learners.conversations`` gives the disguised names to the tokenizer's own control tokens. Noncharacters in messages become
replacement characters.

Answers are what the template puts between ``{% generation %}`` and ``{% endgeneration %}``. In a template without these, an
answer is what a rendering of the messages up to it adds to the rendering of those before it, with its generation prompt.
Some templates shorten earlier answers, as Qwen 3 does with what it thought; then an answer is where the text changes with
the content of its message, with the end of its turn.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from hashlib import blake2b
from typing import Any

from orchestrator.errors import ConfigurationError, Problem, first_line
from orchestrator.system.roots import AllowedRoots, open_data, shown
from orchestrator.text.text_records import NotText
from orchestrator.text.tokenizer_file import (
    AS_TOKENIZER,
    BESIDE_BYTES_MAX,
    CONFIG,
    SPECIAL_TOKENS,
    TokenizerFile,
    beside,
)

FILE = "chat_template.jinja"
DATE = date(2024, 7, 26)
"""What ``strftime_now`` returns: the date that Llama's templates name if there is none."""
MARK, SUBSTITUTE, BEGINS, ENDS, DISGUISE, DISGUISE_ENDS = (chr(0xFDD0 + number) for number in range(6))
"""Noncharacters, which no text has: within a control token of a message, for a message, and around answers and tokens."""
_NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation, with control tokens under their disguised names; ``answers`` are ranges of characters."""

    text: str
    answers: tuple[tuple[int, int], ...]


def disguised(control: str) -> str:
    """Return the name of a control token that no text of a message contains."""
    return f"{DISGUISE}{control}{DISGUISE_ENDS}"


def load(roots: AllowedRoots, template: str, tokenizer: str, file: TokenizerFile) -> ChatTemplate | None:
    """Return the template that ``data.template`` names for the tokenizer at this path; None if it has none.

    Raises ConfigurationError for a template that is not valid or cannot be read, OutsideRoots.
    """
    source = _read(roots, template, tokenizer)
    control = [text for text, token in file.tokens.items() if token in file.never_text]
    return None if source is None else ChatTemplate(*source, control)


def missing(template: str, tokenizer: str) -> Problem:
    """Return the problem of rows with messages, for a tokenizer without a template."""
    remedy = "Use the tokenizer.json of a chat model, with its tokenizer_config.json or chat_template.jinja beside it"
    message = f"is {template!r}, but {shown(tokenizer)} has no chat template, which rows with messages need."
    return Problem("data.template", message, f"{remedy}, or name a template's file.")


def _read(roots: AllowedRoots, template: str, tokenizer: str) -> tuple[str, dict[str, str]] | None:
    """Return the template's source, and the tokenizer's named tokens."""
    config, special = (beside(roots, tokenizer, name) for name in (CONFIG, SPECIAL_TOKENS))
    named = {name: _content(special.get(name, config.get(name))) for name in _NAMED_TOKENS}
    tokens = {name: text for name, text in named.items() if text}
    if template != AS_TOKENIZER:
        return _file(roots, template, "data.template"), tokens
    try:
        return _file(roots, f"{tokenizer.rpartition('/')[0]}/{FILE}", "data.template"), tokens
    except FileNotFoundError:
        pass
    listed = config.get("chat_template")
    if isinstance(listed, list):
        by_name = {each.get("name"): each.get("template") for each in listed if isinstance(each, dict)}
        listed = by_name.get("default")
    return (listed, tokens) if isinstance(listed, str) else None


def _file(roots: AllowedRoots, path: str, field: str) -> str:
    try:
        with open_data(roots, path) as file:
            content = file.read(BESIDE_BYTES_MAX + 1)
        if len(content) > BESIDE_BYTES_MAX:
            raise ConfigurationError(detail=f"{field}: {shown(path)} has more than {BESIDE_BYTES_MAX >> 20} MiB.")
        return content.decode()
    except FileNotFoundError:
        if path.endswith(f"/{FILE}"):
            raise
        detail = f"{field}: {shown(path)} does not exist here. It must exist on every node."
        raise ConfigurationError(detail=detail) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(detail=f"{field}: {shown(path)} cannot be read here ({first_line(error)}).") from error


def _content(token: object) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


class ChatTemplate:
    """Renders conversations. Raises ConfigurationError, on construction, for a source that is no template.

    ``tokens`` are the tokenizer's named tokens, such as ``bos_token``; ``control`` the texts of its control tokens. The
    ``digest`` is that of the source and the named tokens.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], control: Iterable[str]) -> None:
        self._tokens = dict(tokens)
        texts = sorted({text for text in control if text}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._pieces = re.compile(f"(?P<control>{self._control.pattern})|[{MARK}{BEGINS}{ENDS}]")
        self._turn_end = re.compile(f"(?:{self._control.pattern})(\\s+)$")
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        self._source = source
        self.digest = blake2b(repr((source, sorted(self._tokens.items()))).encode(), digest_size=16).hexdigest()
        _ = self._template

    @cached_property
    def _template(self) -> Any:
        try:
            import jinja2
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            detail = "data.template: the package jinja2 is not installed here. Install atoll[text] on every node."
            raise ConfigurationError(detail=detail) from error

        def raise_exception(message: object) -> None:
            raise jinja2.TemplateError(str(message))

        def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            shown_as = {name: options[name] for name in ("indent", "separators", "sort_keys") if name in options}
            return json.dumps(value, ensure_ascii=ensure_ascii, **shown_as)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals |= {"raise_exception": raise_exception, "strftime_now": DATE.strftime}
        try:
            return environment.from_string(self._source)
        except jinja2.TemplateError as error:
            detail = f"data.template: it is no Jinja template ({first_line(error)}). Use the model's published one."
            raise ConfigurationError(detail=detail) from error

    def checked(self, conversation: Mapping[str, Any]) -> Rendered:
        """Return the text of a conversation of ``text_records.conversation_of`` that has messages. Raises NotText."""
        return self.rendered(conversation["messages"], conversation.get("tools"), conversation["learn_from"])

    def rendered(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, learn_from: int = 0) -> Rendered:
        """Return the text of a conversation. Answers are those of messages from number ``learn_from`` on.

        Raises NotText if the template refuses the conversation, or leaves a message out.
        """
        own = [{**self._marked(message), "role": message["role"]} for message in messages]
        tools = self._marked(tools)
        whole = self._render(own, tools)
        answering = [at for at, message in enumerate(own) if message["role"] == "assistant"]
        if BEGINS in whole:
            marks = [mark.start() for mark in re.finditer(f"[{BEGINS}{ENDS}]", whole)]
            spans = list(zip(marks[::2], marks[1::2], strict=False))
            if len(spans) == len(answering):
                spans = [span for at, span in zip(answering, spans, strict=True) if at >= learn_from]
            elif learn_from:
                raise NotText(
                    f"has {len(answering)} answers, but its rendering {len(spans)}, so the completion is not known"
                )
        else:
            spans = [self._answer(whole, own, at, tools) for at in answering if at >= learn_from]
        self._require_all(whole, own, tools)
        return self._plain(whole, spans)

    def _render(self, messages: Sequence[Any], tools: Any, *, prompts: bool = False) -> str:
        try:
            text: str = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompts, **self._tokens
            )
        except Exception as error:  # a template may do anything
            raise NotText(f"is refused by the chat template: {first_line(error).rstrip('.')}") from error
        return text

    def _answer(self, whole: str, messages: Sequence[Any], at: int, tools: Any) -> tuple[int, int]:
        """Return where the answer of message ``at`` is."""
        try:
            before = self._render(messages[:at], tools, prompts=True)
            until = self._render(messages[: at + 1], tools)
        except NotText:  # some templates refuse a conversation without its end, or without a message
            before, until = SUBSTITUTE, ""
        if until.startswith(before) and whole.startswith(until):
            return len(before), len(until)
        if _is_replaceable(messages[at]):
            other = _without_calls(messages, at)
            start, end = _changed(whole, self._render(_replaced(other, at), tools))
            _, after = _changed(until, self._render(_replaced(other[: at + 1], at), tools)) if until else (0, 0)
            rest = until[after:]
            if start < end:
                return start, end + len(rest) * whole.startswith(rest, end)
        raise NotText(
            f"has an answer (message {at + 1}) that the chat template renders in another way when more follows. Put "
            "{% generation %} and {% endgeneration %} around answers in a template of your own, and name it in data.template"
        )

    def _require_all(self, whole: str, messages: Sequence[Any], tools: Any) -> None:
        """Raise NotText if the template leaves a message out. A short text may occur in another message, or in a role."""
        marked = {
            at: f"{SUBSTITUTE}{at}{SUBSTITUTE}"
            for at, message in enumerate(messages)
            if isinstance(content := message.get("content"), str) and content.strip()
        }
        try:
            other = self._render(
                [{**each, "content": marked.get(at, each.get("content"))} for at, each in enumerate(messages)], tools
            )
        except NotText:  # it reads what is in a message
            other = ""
        for at, message in enumerate(messages):
            is_there = at not in marked or marked[at] in other
            if not is_there and self._render(_replaced(messages, at), tools) == whole:
                raise NotText(
                    f"has a message of the role {message['role']!r}, which the chat template leaves out. Remove such "
                    "messages, or set data.template to a template that has the role"
                )

    def _plain(self, whole: str, spans: Sequence[tuple[int, int]]) -> Rendered:
        """Disguise the control tokens of the template, remove marks, and return where the spans are then."""
        parts, at, length, starts, moved = list[str](), 0, 0, [0], [0]
        for piece in self._pieces.finditer(whole):
            parts.append(whole[at : piece.start()])
            length += piece.start() - at
            starts.append(piece.start())
            moved.append(length)
            control = piece["control"]
            parts.append(disguised(control) if control else "")
            length += len(parts[-1])
            at = piece.end()
            starts.append(at)
            moved.append(length)
        parts.append(whole[at:])

        def place(before: int) -> int:
            number = bisect_right(starts, before) - 1
            return moved[number] + before - starts[number]

        answers = []
        for start, end in spans:
            if trailing := self._turn_end.search(whole[start:end]):
                end -= len(trailing[1])
            answers.append((place(start), place(end)))
        return Rendered("".join(parts), tuple(answers))

    def _unspelt(self, text: str) -> str:
        clean = _NONCHARACTERS.sub("\ufffd", text)
        return self._control.sub(lambda spelt: f"{spelt[0][0]}{MARK}{spelt[0][1:]}", clean)

    def _marked(self, value: Any) -> Any:
        """Return a value of a row such that none of its strings spells a control token, nor ends with a part of one."""
        if isinstance(value, str):
            text = self._unspelt(value)
            tail = next((n for n in range(self._longest, 0, -1) if text[-n:] in self._beginnings), 0)
            return text + MARK if tail else text
        if isinstance(value, Mapping):
            return {self._unspelt(name): self._marked(each) for name, each in value.items()}
        return [self._marked(each) for each in value] if isinstance(value, list | tuple) else value


def _is_replaceable(message: Mapping[str, Any]) -> bool:
    """Return whether an answer is a text or calls of tools, and no list of parts."""
    content = message.get("content")
    return (isinstance(content, str) and content != "") or (not content and bool(message.get("tool_calls")))


def _replaced(messages: Sequence[Any], at: int) -> list[Any]:
    return [{**message, "content": SUBSTITUTE} if n == at else message for n, message in enumerate(messages)]


def _without_calls(messages: Sequence[Any], at: int) -> list[Any]:
    answer = {name: value for name, value in messages[at].items() if name != "tool_calls"}
    return [answer if n == at else message for n, message in enumerate(messages)]


def _changed(text: str, other: str) -> tuple[int, int]:
    """Return the part of ``text`` outside of the common beginning and end of both."""
    start = _alike(text, other)
    return start, len(text) - _alike(text[start:][::-1], other[start:][::-1])


def _alike(text: str, other: str) -> int:
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (one, two) in pairs if one != two), min(len(text), len(other)))


def _generation() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """``{% generation %}`` … ``{% endgeneration %}``: puts noncharacters around an answer."""

        tags = frozenset({"generation"})  # type: ignore[assignment]  # a set that nobody changes

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

        def _around(self, caller: Any) -> str:
            return f"{BEGINS}{caller()}{ENDS}"

    return Generation
