"""The chats of ``make parity``: templates of the kinds that published models have, their tokenizers, and conversations.

Each template marks its answers with ``{% generation %}``, as transformers needs for its mask of an assistant's tokens.
Without the marks the same template must have the same answers here: that is how most published ones are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from learners import conversations, tokenizer
from learners.conversations import LEARNED, TOKEN
from orchestrator.errors import ConfigurationError
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import EVERYTHING
from orchestrator.text.text_records import CONVERSATION, NotText, text_of

MARKS = re.compile(r"\{%-? *(?:end)?generation *-?%\}")
LENGTH = 4000
CHATML = """
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}
{%- if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SMOLLM = """
{%- for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a small model that helps.<|im_end|>\\n' }}{% endif %}""" + CHATML.split("%}", 1)[1]
TOOLS = """
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}{{ default }}{% endif %}"""
CALLS = """
{%- for call in m.tool_calls %}{% if call.function %}{% set call = call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}"""
RESULTS = """
{%- elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TURN = """
{%- for m in messages %}{% if m.role == 'user' or m.role == 'system' and not loop.first %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% elif m.role == 'assistant' %}"""
QWEN2 = (
    "{% set default = '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' %}" + TOOLS + TURN
    + "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ m.content or '' }}" + CALLS
    + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}" + RESULTS
)  # fmt: skip
QWEN3 = (
    "{% set default = '' %}{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}" + TOOLS + TURN
    + "{% set thought, said = '', m.content or '' %}{% if m.reasoning_content is string %}"
    "{% set thought = m.reasoning_content %}{% elif '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}{% generation %}{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + said.lstrip('\\n') }}{% else %}{{ said }}{% endif %}"
    + CALLS + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}" + RESULTS
)  # fmt: skip
LLAMA2 = """
{%- if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set turns = messages %}{% set system = false %}{% endif %}
{%- for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate') }}{% endif %}
{%- if m['role'] == 'user' %}{{ bos_token + '[INST] ' }}
{%- if loop.first and system %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}
{{- m['content'].strip() + ' [/INST]' }}
{%- else %}{% generation %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"""
LLAMA3 = """
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}
{%- if tools %}{{ 'You have these functions:\\n\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{%- endif %}{{ system + '<|eot_id|>' }}
{%- for m in turns %}{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% generation %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}{% endgeneration %}
{%- elif m.role == 'assistant' %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% generation %}
{{- m.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{{- m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
GEMMA2 = """
{{- bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{% endif %}
{%- if m['role'] == 'assistant' %}{{ '<start_of_turn>model\\n' }}{% generation %}
{{- m['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ '<start_of_turn>' + m['role'] + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
GEMMA3 = """
{{- bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}
{%- set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}
{%- for m in turns %}{% if m['role'] == 'assistant' %}{{ '<start_of_turn>model\\n' }}{% generation %}
{{- m['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ '<start_of_turn>' + m['role'] + '\\n' + (first if loop.first else '') + m['content'] | trim }}
{{- '<end_of_turn>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}{% set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}{% for m in turns %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS][' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}{{ '][/AVAILABLE_TOOLS]' }}{% endif %}
{%- if loop.last and system is defined %}{{ '[INST]' + system + '\\n\\n' + m.content + '[/INST]' }}
{%- else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}
{%- elif m.tool_calls %}{% generation %}{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}{{ call.function | tojson }}
{{- '' if loop.last else ', ' }}{% endfor %}{{ ']' + eos_token }}{% endgeneration %}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]{"content": ' + m.content | string + '}[/TOOL_RESULTS]' }}
{%- else %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"""


@dataclass(frozen=True)
class Kind:
    """A template, and the control tokens of its tokenizer: the first begins a text, the second ends one."""

    template: str
    control: tuple[str, ...]
    has_spaces: bool = False
    omits_system: bool = False
    """It leaves the system's message out of a conversation that ends with an answer, which is refused here."""


QWEN = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
LLAMA = ("<s>", "</s>", "<unk>")
HEADERS = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")
TURNS = ("<bos>", "<eos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
INSTRUCTIONS = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
KINDS = {
    "chatml": Kind(CHATML, QWEN),
    "smollm": Kind(SMOLLM, QWEN),
    "qwen2": Kind(QWEN2, QWEN),
    "qwen3": Kind(QWEN3, (*QWEN, "<tool_call>", "</tool_call>")),
    "llama2": Kind(LLAMA2, LLAMA, has_spaces=True),
    "llama3": Kind(LLAMA3, HEADERS),
    "gemma2": Kind(GEMMA2, TURNS, has_spaces=True),
    "gemma3": Kind(GEMMA3, TURNS, has_spaces=True),
    "mistral": Kind(MISTRAL, (*LLAMA, *INSTRUCTIONS, "[/TOOL_RESULTS]"), has_spaces=True, omits_system=True),
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wie ist das Wetter? <now> & 'then'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 10}}}


def _turns(*texts: str, system: str = "") -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": system}] * bool(system) + turns}


def _called(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the conversation with a tool's call, its result, and more turns."""
    call = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": '{"rain": true}'}]
    rest = _turns("", "It rains.", "Thanks", "Gladly.")["messages"][1:]
    return {"messages": [*asked["messages"], *call, *rest], "tools": [WEATHER, WEATHER]}


CONVERSATIONS = [
    _turns("What is two and two?", "Four."),
    _turns("Hi", "Hello! How can I help?", "Sing.", "La la la.", "Again", "La."),
    _turns("Count.", "1, 2, 3", "More", "4, 5, 6", system="You are brief."),
    _turns(
        "  spaces  and\ttabs\n",
        "  an answer\n\nof lines\n  ",
        "naïve 日本語 \U0001f30a",
        "e\u0301 ﬁ ok",
        system="Ünïcode ",
    ),
    _turns("a", "b", "a", "b", "a", "b"),
    _turns("Why?", "<think>\nhm\n</think>\n\nBecause.", "And?", "<think>\nwell\n</think>\n\nSo it is."),
    _turns("def f(x):\n    return x", "```python\ndef f(x: int) -> int:\n    return x\n```"),
    {**_turns("Weather?", "It rains."), "tools": [WEATHER]},
    _called(_turns("Weather in Zürich?", system="Use tools.")),
    _called(_turns("Weather in Zürich?")),
]
"""Without a text that spells a control token: there the two differ on purpose."""


def write(folder: Path) -> None:
    """Write a folder for each kind, with its tokenizer and template, and ``conversations.json`` for all of them."""
    folder.mkdir(exist_ok=True)
    (folder / "conversations.json").write_text(json.dumps(CONVERSATIONS))
    for name, kind in KINDS.items():
        own = folder / name
        own.mkdir(parents=True)
        _tokenizer(kind).save(str(own / "tokenizer.json"))
        named = {"bos_token": kind.control[0], "eos_token": kind.control[1]}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        (own / "tokenizer_config.json").write_text(json.dumps(config))
        (own / "chat_template.jinja").write_text(kind.template)
        (own / "unmarked.jinja").write_text(MARKS.sub("", kind.template))


def _tokenizer(kind: Kind) -> Tokenizer:
    """Return a trained BPE: of bytes, or of characters with bytes for those that it lacks and a sign for spaces."""
    if kind.has_spaces:
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet, more = [], [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet, more = pre_tokenizers.ByteLevel.alphabet(), []
    texts = [message["content"] for each in CONVERSATIONS for message in each["messages"]] * 2
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*kind.control, *more], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    if kind.has_spaces:  # bytes are tokens of the vocabulary, and no added ones
        document = json.loads(made.to_str())
        document["added_tokens"] = [each for each in document["added_tokens"] if each["content"] in kind.control]
        made = Tokenizer.from_str(json.dumps(document))
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in kind.control])
    return made


def differences(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield each kind, with and without marks, the conversations that are alike, and how the others differ.

    A conversation that a template refuses there must be refused here, too.
    """
    for name, kind in KINDS.items():
        theirs = json.loads((folder / name / "chats.json").read_text())
        for template in ("chat_template.jinja", "unmarked.jinja"):
            alike, unlike = 0, []
            for number, (row, wanted) in enumerate(zip(CONVERSATIONS, theirs, strict=True)):
                found = _told(folder / name, template, row)
                if kind.omits_system and row["messages"][0]["role"] == "system":
                    wanted = None
                alike += found == wanted
                unlike += [] if found == wanted else [f"conversation {number}: {_apart(found, wanted)}"]
            yield f"{name}{'' if template.startswith('chat') else ', unmarked'}", alike, " ".join(unlike)


def _told(folder: Path, template: str, row: dict[str, Any]) -> list[list[int]] | None:
    """Return the tokens of a conversation and which are learned, as a job's islands make them; None if it is refused."""
    section = DataSection(
        source="files", files=("/x.jsonl",), format="chat", tokenizer=str(folder / "tokenizer.json"),
        template=str(folder / template), sequence_length=LENGTH,
    )  # fmt: skip
    try:
        text = text_of(json.dumps(row).encode(), CONVERSATION)
        (marked,) = conversations.load(section, EVERYTHING, tokenizer.load(section, EVERYTHING)).encode([text])
    except (NotText, ConfigurationError):
        return None
    return [(marked & TOKEN).tolist(), ((marked & LEARNED) != 0).astype(int).tolist()]


def _apart(found: list[list[int]] | None, wanted: list[list[int]] | None) -> str:
    if found is None or wanted is None:
        return "refused " + ("here" if found is None else "there")
    kind = "tokens" if found[0] != wanted[0] else "mask"
    pairs = zip(*((found[0], wanted[0]) if kind == "tokens" else (found[1], wanted[1])), strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(found[0]), len(wanted[0])))
    return f"{kind} from number {at}: {[part[at : at + 6] for part in found]} here, {[part[at : at + 6] for part in wanted]}"
