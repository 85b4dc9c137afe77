"""The types of numbers and texts in documents and requests, each with its bounds and their reason.

Each bound is defined once. No type accepts infinities, NaN, true for 1, or text for a number. A bound excludes what cannot
be meant, or what this software cannot do; ``api.jobs.path_check`` asks the fleet what it has room for. Rules between fields
are beside the fields (``config``, ``chaos.plan``). All sections of a specification are frozen, and refuse unknown fields.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """The base of all sections. A default that is a section is made by ``model_construct``, so that importing a module
    builds no validator. The first document that a process reads builds those that it needs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


# ── texts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Without control characters: they are not allowed in names of files, and control terminals."""

_NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
_TENSOR_PATTERN = r"^[^\x00-\x1f]*$"
_DIGEST = r"^[0-9a-f]{16,128}$"
_DATASET = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}$"
_REVISION = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,99}){0,4}$"
_CURRENCY = r"^[A-Z]{3}$"
PATTERN_WORDS = {
    _CURRENCY: "three letters A-Z, such as USD",
    PRINTABLE: "without control characters",
    _NAME: "1 to 40 characters of a-z, 0-9 and '-', without '-' at either end",
    FUNCTION: "package.module:function",
    _TENSOR_PATTERN: "without control characters",
    _DIGEST: "16 to 128 characters of 0-9 and a-f",
    _DATASET: "OWNER/NAME, as in the address of the data set's page",
    _REVISION: "a branch, a tag or a commit of up to 100 letters, digits, '.', '_' and '-', with '/' between",
}
"""The description of each pattern in messages, after "must be"."""

SETTINGS_DEPTH_MAX, SETTINGS_COUNT_MAX, SETTINGS_CHARACTERS_MAX = 8, 1_000, 10_000


def _bounded(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings if they are plain data within the limits. Raises ValueError."""
    waiting, count = [(settings, 1)], 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > SETTINGS_DEPTH_MAX:
            raise ValueError(f"is nested more than {SETTINGS_DEPTH_MAX} deep; write it flatter")
        if count > SETTINGS_COUNT_MAX:
            raise ValueError(f"has more than {SETTINGS_COUNT_MAX:,} values; put them into a file, and name that")
        if isinstance(value, dict):
            if not all(isinstance(key, str) and len(key) <= SETTINGS_CHARACTERS_MAX for key in value):
                raise ValueError("has a key that is no text, or a long one; use texts")
            waiting += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(inner, depth + 1) for inner in value]
        elif isinstance(value, str):
            if len(value) > SETTINGS_CHARACTERS_MAX:
                raise ValueError(f"has a text of more than {SETTINGS_CHARACTERS_MAX:,} characters; put it into a file")
        elif not (
            value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
        ):
            raise ValueError(f"has {value!r}, which is no finite number; leave it out")
    return settings


REMARK_CHARACTERS_MAX = 10_000

Name = Annotated[str, Field(pattern=_NAME)]
Settings = Annotated[dict[str, Any], AfterValidator(_bounded)]
"""Plain data for a function of a user's package, which gets it as the keyword ``settings`` and alone knows what it means."""
NodeGroups = Annotated[
    tuple[Name, ...],
    Field(max_length=100, description="where the synchroniser runs, first choice first; if empty, on the head"),
]
"""The name of a job, an island or a node group: part of file names, labels and addresses."""
Word = Annotated[str, Field(min_length=1, max_length=200, pattern=PRINTABLE)]
"""A name that others choose: a field of a file, a region, an island of a tape."""
WordOrNone = Annotated[str, Field(max_length=200, pattern=PRINTABLE)]
Remark = Annotated[str, Field(max_length=REMARK_CHARACTERS_MAX)]
"""A reason in words, which may have several lines."""
Location = Annotated[str, Field(min_length=1, max_length=4096, pattern=PRINTABLE)]
"""A path or a URL. Linux accepts no longer path."""
Function = Annotated[str, Field(max_length=200, pattern=FUNCTION)]
"""``package.module:function``, importable."""

TensorPattern = Annotated[str, Field(min_length=1, max_length=200, pattern=_TENSOR_PATTERN)]
"""A pattern of tensor names, with ``*``, ``?`` and ``[…]`` as in a shell; it may begin with a star and contain dots."""
Digest = Annotated[str, Field(pattern=_DIGEST)]
DatasetId = Annotated[str, Field(pattern=_DATASET)]
"""Of the Hugging Face Hub."""
Revision = Annotated[str, Field(pattern=_REVISION)]
Currency = Annotated[str, Field(pattern=_CURRENCY)]
AdapterRank = Annotated[int, Field(strict=True, ge=1, le=4096)]
"""Published adapters have ranks of 4 to 256."""
AdapterAlpha = Annotated[float, Field(strict=True, gt=0, le=65_536, allow_inf_nan=False)]
PreferenceWeight = Annotated[float, Field(strict=True, gt=0, le=100, allow_inf_nan=False)]

# ── counts ────────────────────────────────────────────────────────────────────────────────────────────────────────────

ISLANDS_MAX = 10_000
"""Of one job, scale-up slots and standbys among them: each is a process, a link and a line of every answer about the job."""
STEP_TOKENS_MAX = 2**28
"""Of one inner step of one island, and of what is held out: a gigabyte of token ids."""
BUDGET_TOKENS_MAX = 10**18
"""A hundred thousand times what any model was trained on, and still below 2⁶³ with every sum made of it."""

Seed = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
"""Shuffling uses 32 bits, and adds the shard's number."""
IslandCount = Annotated[int, Field(strict=True, ge=1, le=ISLANDS_MAX)]
IslandCountFromZero = Annotated[int, Field(strict=True, ge=0, le=ISLANDS_MAX)]
HostCount = Annotated[int, Field(strict=True, ge=1, le=1024)]
ProcessCount = Annotated[int, Field(strict=True, ge=1, le=64)]
HostNumber = Annotated[int, Field(strict=True, ge=0, lt=1024)]

AxisLength = Annotated[int, Field(strict=True, ge=1, le=2**16)]

AcceleratorCount = Annotated[int, Field(strict=True, ge=0, le=1024)]
"""Accelerators of one node; no node has a hundred."""
NodeCount = Annotated[int, Field(strict=True, ge=1, le=1000)]
"""Nodes of one group of an embedded cluster: each is a raylet on this machine."""
MemoryGib = Annotated[float, Field(strict=True, ge=0.1, le=1e6, allow_inf_nan=False)]
CpuCount = Annotated[int, Field(strict=True, ge=1, le=10_000)]
"""Processors of one node."""

BYTES = "bytes"
"""The tokenizer that needs no file."""
BYTE_COUNT = 256
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
UnreadableCount = Annotated[int, Field(strict=True, ge=0, le=10**9)]
SECTION_BYTES = 1 << 30
"""As much of a streamed source as an island may have to count again after a restart; of more, epochs are estimated."""
StoredBytes = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
SourceWeight = Annotated[float, Field(strict=True, ge=1e-3, le=1e6, allow_inf_nan=False)]
"""Relative to the other weights: below a thousandth of the largest, a source would hardly ever be drawn from."""

StepCount = Annotated[int, Field(strict=True, ge=1, le=10**12)]
"""Inner steps of one island: at a thousand a second, thirty years."""
StepCountOrNone = Annotated[int, Field(strict=True, ge=0, le=10**12)]
RoundSteps = Annotated[int, Field(strict=True, ge=1, le=10**6)]
"""Inner steps between two merges of a fragment: tens in the paper; with a million, islands would be alone for days."""
RoundStepsOrNone = Annotated[int, Field(strict=True, ge=0, le=10**6)]
VersionCount = Annotated[int, Field(strict=True, ge=0, le=10**6)]
"""Versions by which work may be late: work that is a million versions late is useless."""
FRAGMENTS_MAX = 10_000
FragmentCount = Annotated[int, Field(strict=True, ge=1, le=FRAGMENTS_MAX)]
"""The paper has 24, and no model has ten thousand tensors worth sending alone. Each is a line of every status."""
SHARDS_MAX = 64
ShardCount = Annotated[int, Field(strict=True, ge=1, le=SHARDS_MAX)]
"""Each is a process with a journal and a line of its own. The synchroniser has a thread or two for each."""
TokenCount = Annotated[int, Field(strict=True, ge=1, le=BUDGET_TOKENS_MAX)]
SequenceCount = Annotated[int, Field(strict=True, ge=1, le=10**6)]
"""Sequences in one batch of one island, or held out; see ``STEP_TOKENS_MAX``."""
MicrobatchCount = Annotated[int, Field(strict=True, ge=1, le=10**6)]
"""Parts of one batch of one island; as ``SequenceCount``."""
BatchParts = Annotated[int, Field(strict=True, ge=2, le=64)]
"""Sizes of a growing batch. A step of each size is compiled."""
SampleCount = Annotated[int, Field(strict=True, ge=1, le=10**12)]
"""Sequences of a whole training run: of one token each, as many as ``StepCount``."""
SequenceLength = Annotated[int, Field(strict=True, ge=1, le=2**20)]
"""Tokens of a sequence: a million is the longest context in use."""
ParameterCount = Annotated[int, Field(strict=True, ge=1, le=10**9)]
"""Parameters of a synthetic model, which islands and synchroniser hold several times: 10⁹ take tens of gigabytes."""
StepRatio = Annotated[float, Field(strict=True, ge=2, le=1e6, allow_inf_nan=False)]
"""A multiple of the usual step's duration."""
MergeCount = Annotated[int, Field(strict=True, ge=0, le=10**9)]
"""Merges between two actions: a job of years makes fewer than the maximum, which therefore means never."""
RecordCount = Annotated[int, Field(strict=True, ge=1, le=10**8)]
"""Records of a tape: more than a hundred million take an hour to replay."""
KeptCount = Annotated[int, Field(strict=True, ge=1, le=10_000)]
"""Checkpoints that are kept, each with the parameters and every island's state."""
RestartCount = Annotated[int, Field(strict=True, ge=0, le=1000)]
"""Restarts in a row: each wait is twice the last one, and a float holds 1,023 doublings."""
StreamCount = Annotated[int, Field(strict=True, ge=1, le=256)]
"""Connections of one transfer: sixteen were no faster than eight, and a server accepts 256."""
Port = Annotated[int, Field(strict=True, ge=0, le=65_535)]
"""A TCP port."""
StrikeCount = Annotated[int, Field(strict=True, ge=1, le=10**6)]
StrikeCountOrNone = Annotated[int, Field(strict=True, ge=0, le=10**6)]
"""Bad contributions in a row, or quarantines: a million practically means never."""
IncarnationCount = Annotated[int, Field(strict=True, ge=1, le=10**9)]

# ── ratios, rates and sizes ───────────────────────────────────────────────────────────────────────────────────────────

Ratio = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
TimeRatio = Annotated[float, Field(strict=True, gt=0, le=1e6, allow_inf_nan=False)]
"""The ratio of two times. A million practically means no limit."""
RatioBelowOne = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
"""A decay, a momentum or a margin: at 1 nothing would ever decay, or nothing would be left."""
LearningRate = Annotated[float, Field(strict=True, ge=1e-12, le=1000, allow_inf_nan=False)]
"""Below this range float32 parameters do not change; above it no optimizer converges."""
RateRatio = Annotated[float, Field(strict=True, ge=0, le=1000, allow_inf_nan=False)]
"""The ratio of a group's learning rate to the common one: at 0 its tensors do not change."""
WeightDecay = Annotated[float, Field(strict=True, ge=0, le=1000, allow_inf_nan=False)]
GradientNorm = Annotated[float, Field(strict=True, ge=1e-9, le=1e9, allow_inf_nan=False)]
"""The norm to which gradients are clipped: 10⁹ clips nothing."""
Epsilon = Annotated[float, Field(strict=True, ge=1e-15, le=1000, allow_inf_nan=False)]
"""It keeps a divisor from 0. Float32 has smaller numbers, but their squares are 0."""
DisplacementRatio = Annotated[float, Field(strict=True, gt=1, le=1e12, allow_inf_nan=False)]
"""A multiple of the usual norm: 10¹² times any usual norm is beyond float32's range."""
RoundStepsRatio = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)]
"""Steps, or parts of one; as ``RoundSteps``."""
Cpus = Annotated[float, Field(strict=True, ge=0.0001, le=10_000, allow_inf_nan=False)]
"""Processors that Ray reserves for one island, in units of a ten-thousandth."""
BytesPerSecond = Annotated[float, Field(strict=True, ge=1, le=1e15, allow_inf_nan=False)]
"""From a rate at which nothing arrives to more than any network carries."""
ByteCount = Annotated[int, Field(strict=True, ge=0, le=2**53)]
"""Eight petabytes; JSON numbers are exact integers up to here."""
Money = Annotated[float, Field(strict=True, ge=0, le=1e12, allow_inf_nan=False)]
"""A price or a sum in any currency."""
Flops = Annotated[float, Field(strict=True, gt=0, le=1e21, allow_inf_nan=False)]
CostLimit = Annotated[float, Field(strict=True, gt=0, le=1e12, allow_inf_nan=False)]
Factor = Annotated[float, Field(strict=True, ge=1e-6, le=1e6, allow_inf_nan=False)]
"""A factor by which something takes longer."""

# ── durations, in seconds ─────────────────────────────────────────────────────────────────────────────────────────────

DURATION_MAX_S = 1e12
"""A duration in virtual time: at most thirty thousand years, in which a float still resolves microseconds."""

Timeout = Annotated[float, Field(strict=True, ge=0.001, le=1e8, allow_inf_nan=False)]
"""A deadline: a millisecond is less than a network needs; three years mean for ever, and a lock can wait that long."""
Wait = Annotated[float, Field(strict=True, ge=0, le=1e8, allow_inf_nan=False)]
"""Like ``Timeout``; 0 means no limit."""
AdviceSeconds = Annotated[float, Field(strict=True, ge=10, le=1e8, allow_inf_nan=False)]
"""A look at a tape takes seconds to a minute of one core."""
StepSeconds = Annotated[float, Field(strict=True, ge=1e-6, le=86_400, allow_inf_nan=False)]
"""The duration of an inner step: an empty one takes a microsecond, and no job waits a day for its first merge."""
VirtualSeconds = Annotated[float, Field(strict=True, ge=0, le=DURATION_MAX_S, allow_inf_nan=False)]
"""In a world that was simulated or recorded."""
VirtualSecondsAboveZero = Annotated[float, Field(strict=True, ge=1e-9, le=DURATION_MAX_S, allow_inf_nan=False)]
