"""The types of numbers and texts in documents and requests, each with its bounds and their reason.

Each bound is defined once. No type accepts infinities, NaN, true for 1, or text for a number. A bound excludes what cannot
be meant, or what this software cannot do; ``api.jobs.path_check`` asks the fleet what it has room for. Rules between fields
are beside the fields (``config``, ``chaos.plan``). All sections of a specification are frozen, and refuse unknown fields.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# ── texts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Without control characters: files cannot be called so, and terminals obey them."""

_NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
_FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
_TENSOR_PATTERN = r"^[^\x00-\x1f]*$"
_DIGEST = r"^[0-9a-f]{16,128}$"
PATTERN_WORDS = {
    PRINTABLE: "without control characters",
    _NAME: "1 to 40 characters of a-z, 0-9 and '-', without '-' at either end",
    _FUNCTION: "package.module:function",
    _TENSOR_PATTERN: "without control characters",
    _DIGEST: "16 to 128 characters of 0-9 and a-f",
}
"""The description of each pattern in messages, after "must be"."""

REMARK_CHARACTERS_MAX = 10_000

Name = Annotated[str, Field(pattern=_NAME)]
"""Of a job, an island, a node group: part of file names, labels and addresses."""
Word = Annotated[str, Field(min_length=1, max_length=200, pattern=PRINTABLE)]
"""Something's name where it is not ours to give: a field of a file, a region, an island of a tape."""
WordOrNone = Annotated[str, Field(max_length=200, pattern=PRINTABLE)]
Remark = Annotated[str, Field(max_length=REMARK_CHARACTERS_MAX)]
"""A reason in words, of several lines perhaps."""
Location = Annotated[str, Field(min_length=1, max_length=4096, pattern=PRINTABLE)]
"""A path or a URL. Linux takes no longer path."""
Function = Annotated[str, Field(max_length=200, pattern=_FUNCTION)]
"""``package.module:function``, as it could be imported."""

TensorPattern = Annotated[str, Field(min_length=1, max_length=200, pattern=_TENSOR_PATTERN)]
"""Of names of tensors, with ``*``, ``?`` and ``[…]`` as in a shell; it may begin with a star, and contain dots."""
Digest = Annotated[str, Field(pattern=_DIGEST)]

# ── counts ────────────────────────────────────────────────────────────────────────────────────────────────────────────

ISLANDS_MAX = 10_000
"""Of one job, scale-up slots and standbys among them: each is a process, a link and a line of every answer about the job."""
STEP_TOKENS_MAX = 2**28
"""Of one inner step of one island, and of what is held out: a gigabyte of token ids."""
BUDGET_TOKENS_MAX = 10**18
"""A hundred thousand times what any model was trained on, and still below 2⁶³ with every sum made of it."""

Seed = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
"""Shuffling takes 32 bits, of which the shard's number is added."""
IslandCount = Annotated[int, Field(strict=True, ge=1, le=ISLANDS_MAX)]
IslandCountFromZero = Annotated[int, Field(strict=True, ge=0, le=ISLANDS_MAX)]
HostCount = Annotated[int, Field(strict=True, ge=1, le=1024)]
HostNumber = Annotated[int, Field(strict=True, ge=0, lt=1024)]

AxisLength = Annotated[int, Field(strict=True, ge=1, le=2**16)]

AcceleratorCount = Annotated[int, Field(strict=True, ge=0, le=1024)]
"""Of one node, as an island runs on one: no node has a hundred."""
NodeCount = Annotated[int, Field(strict=True, ge=1, le=1000)]
"""Of one node group of an embedded cluster: each is a raylet on this machine."""
MemoryGib = Annotated[float, Field(strict=True, ge=0.1, le=1e6, allow_inf_nan=False)]
CpuCount = Annotated[int, Field(strict=True, ge=1, le=10_000)]
"""Of one node."""

BYTES = "bytes"
"""The tokenizer that needs no file."""
BYTE_COUNT = 256
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
UnreadableCount = Annotated[int, Field(strict=True, ge=0, le=10**9)]
SECTION_BYTES = 1 << 30
"""As much of a streamed source as an island may have to count again after a restart; of more, epochs are estimated."""
StoredBytes = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
SourceWeight = Annotated[float, Field(strict=True, ge=1e-3, le=1e6, allow_inf_nan=False)]
"""Beside the other weights: a source has at least a thousandth of the largest, or it would hardly ever be drawn from."""

StepCount = Annotated[int, Field(strict=True, ge=1, le=10**12)]
"""Inner steps of one island: at a thousand a second, thirty years."""
StepCountOrNone = Annotated[int, Field(strict=True, ge=0, le=10**12)]
RoundSteps = Annotated[int, Field(strict=True, ge=1, le=10**6)]
"""Inner steps between two merges of a fragment: the paper's are tens, and at a million islands are on their own for days."""
RoundStepsOrNone = Annotated[int, Field(strict=True, ge=0, le=10**6)]
VersionCount = Annotated[int, Field(strict=True, ge=0, le=10**6)]
"""Versions that work may be late by: at a million it is of no use to anybody."""
FRAGMENTS_MAX = 10_000
FragmentCount = Annotated[int, Field(strict=True, ge=1, le=FRAGMENTS_MAX)]
"""The paper has 24; no model has ten thousand tensors worth sending alone. Each is a line of every answer about the job."""
TokenCount = Annotated[int, Field(strict=True, ge=1, le=BUDGET_TOKENS_MAX)]
SequenceCount = Annotated[int, Field(strict=True, ge=1, le=10**6)]
"""In one batch of one island, or held out; see ``STEP_TOKENS_MAX``."""
MicrobatchCount = Annotated[int, Field(strict=True, ge=1, le=10**6)]
"""In one batch of one island; as ``SequenceCount``."""
SequenceLength = Annotated[int, Field(strict=True, ge=1, le=2**20)]
"""In tokens: a million is the longest context that anybody trains."""
ParameterCount = Annotated[int, Field(strict=True, ge=1, le=10**9)]
"""Of a synthetic model, which islands and synchroniser hold several times: a thousand million are tens of gigabytes."""
StepRatio = Annotated[float, Field(strict=True, ge=2, le=1e6, allow_inf_nan=False)]
"""How many times as long as the usual step."""
MergeCount = Annotated[int, Field(strict=True, ge=0, le=10**9)]
"""Merges between two of something: a job of years makes fewer, so it never comes."""
RecordCount = Annotated[int, Field(strict=True, ge=1, le=10**8)]
"""Of a tape: more than a hundred million take an hour to replay."""
KeptCount = Annotated[int, Field(strict=True, ge=1, le=10_000)]
"""Checkpoints that are kept, each with the parameters and every island's state."""
RestartCount = Annotated[int, Field(strict=True, ge=0, le=1000)]
"""In a row: each wait doubles the last, and a float holds 1,023 doublings."""
StreamCount = Annotated[int, Field(strict=True, ge=1, le=256)]
"""Connections of one transfer: sixteen were no faster than eight, and a server attends to 256."""
Port = Annotated[int, Field(strict=True, ge=0, le=65_535)]
"""Of TCP."""
StrikeCount = Annotated[int, Field(strict=True, ge=1, le=10**6)]
StrikeCountOrNone = Annotated[int, Field(strict=True, ge=0, le=10**6)]
"""Bad contributions in a row, or quarantines: a million is as good as never."""
IncarnationCount = Annotated[int, Field(strict=True, ge=1, le=10**9)]

# ── ratios, rates and sizes ───────────────────────────────────────────────────────────────────────────────────────────

Ratio = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
TimeRatio = Annotated[float, Field(strict=True, gt=0, le=1e6, allow_inf_nan=False)]
"""Of one time to another. Who wants no bound may want a million."""
RatioBelowOne = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
"""A decay, a momentum or a margin: at 1 nothing ever leaves, or nothing is left."""
LearningRate = Annotated[float, Field(strict=True, ge=1e-12, le=1000, allow_inf_nan=False)]
"""Below, float32 does not change; above, no optimizer converges."""
RateRatio = Annotated[float, Field(strict=True, ge=0, le=1000, allow_inf_nan=False)]
"""Of a group's learning rate to that of all: at 0 its tensors stay as they are."""
WeightDecay = Annotated[float, Field(strict=True, ge=0, le=1000, allow_inf_nan=False)]
GradientNorm = Annotated[float, Field(strict=True, ge=1e-9, le=1e9, allow_inf_nan=False)]
"""What gradients are clipped to: 10⁹ clips nothing."""
DisplacementRatio = Annotated[float, Field(strict=True, gt=1, le=1e12, allow_inf_nan=False)]
"""So many times the usual: 10¹² is out of float32's reach from anything usual."""
RoundStepsRatio = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)]
"""Steps, or parts of one; as ``RoundSteps``."""
Cpus = Annotated[float, Field(strict=True, ge=0.0001, le=10_000, allow_inf_nan=False)]
"""What Ray books for one island: it counts in ten-thousandths."""
BytesPerSecond = Annotated[float, Field(strict=True, ge=1, le=1e15, allow_inf_nan=False)]
"""From what moves nothing to what no network carries."""
ByteCount = Annotated[int, Field(strict=True, ge=0, le=2**53)]
"""Eight petabytes; JSON's numbers are whole up to here."""
Factor = Annotated[float, Field(strict=True, ge=1e-6, le=1e6, allow_inf_nan=False)]
"""How many times as long something takes."""

# ── durations, in seconds ─────────────────────────────────────────────────────────────────────────────────────────────

DURATION_MAX_S = 1e12
"""Of anything in virtual time: thirty thousand years. Microseconds of it are still whole in a float."""

Timeout = Annotated[float, Field(strict=True, ge=0.001, le=1e8, allow_inf_nan=False)]
"""A deadline: a millisecond is below what a network takes; three years are for ever, and less than a lock can wait."""
Wait = Annotated[float, Field(strict=True, ge=0, le=1e8, allow_inf_nan=False)]
"""Like ``Timeout``; 0 means no limit."""
StepSeconds = Annotated[float, Field(strict=True, ge=1e-6, le=86_400, allow_inf_nan=False)]
"""Of one inner step: a microsecond is what an empty one takes, a day is longer than any job waits for its first merge."""
VirtualSeconds = Annotated[float, Field(strict=True, ge=0, le=DURATION_MAX_S, allow_inf_nan=False)]
"""In a world that was simulated or recorded."""
VirtualSecondsAboveZero = Annotated[float, Field(strict=True, ge=1e-9, le=DURATION_MAX_S, allow_inf_nan=False)]
