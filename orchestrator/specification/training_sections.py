"""The sections of a job specification that say what is trained: model, data, inner optimizer, training.

What is right within one section is said here, in types; ``sections`` has the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from orchestrator.core.vocabulary import is_router
from orchestrator.errors import Problem
from orchestrator.models import trainable
from orchestrator.models.decoder import DecoderSection, VocabularySize
from orchestrator.models.presets import DECODERS, PLAIN, Architecture, PresetName
from orchestrator.models.trainable import ALL_LINEAR
from orchestrator.specification.bounds import (
    FUNCTION,
    AdapterAlpha,
    AdapterRank,
    BatchParts,
    Digest,
    Function,
    GradientNorm,
    LearningRate,
    Location,
    MicrobatchCount,
    PreferenceWeight,
    RateRatio,
    Ratio,
    RatioBelowOne,
    SampleCount,
    SequenceCount,
    SequenceLength,
    Settings,
    StepCountOrNone,
    StoredBytes,
    TensorPattern,
    TokenCount,
    TokenId,
    UnreadableCount,
    WeightDecay,
    Word,
)
from orchestrator.specification.bounds import Section as Section
from orchestrator.specification.data_sources import FILES_MAX, SourceSection
from orchestrator.system.plain import brief
from orchestrator.text.text_records import CONVERSATION, PREFERENCE

BUILT_IN_TRAINER = "learners.jax_trainer:create"
SYNTHETIC_TRAINER = "learners.synthetic:create"
TORCH_TRAINER = "learners.torch_trainer:create"
TRAINERS_OF_PARTS = (BUILT_IN_TRAINER, TORCH_TRAINER)
"""The trainers that obey ``trainable``."""
INSTALL_TORCH = "Install it on every node: pip install 'atoll[torch]'."
INSTALL_4_BIT = "Install it on every node, pip install bitsandbytes, or leave trainable.base out."
SOURCES_MAX = 64
"""Of a streamed data set: an island holds some megabytes of each."""
GROUPS_MAX = 100
"""Groups of tensors: each is tried on each tensor, whenever a step is compiled."""


class ModelSection(Section):
    """The model: a preset, your own ``decoder``, or ``factory: package.module:function`` of an installed package.

    Set ``vocabulary_size`` if the tokenizer's size differs from the preset's. ``initial_weights`` is a folder with weights
    in the format of Hugging Face's libraries (`config.json`, `model.safetensors`); the job continues from them. Without
    preset and decoder, its `config.json` describes the model; otherwise the weights must fit. The evaluator's node must have
    the folder, below a root (`atoll up --data`). ``remat`` selects what a decoder recomputes for the gradient: ``dots``
    recomputes everything except matrix products, which costs less time; ``full`` recomputes everything, which takes the
    least memory. ``attention`` names the kernel of a decoder's attention: ``auto`` takes cuDNN's on GPUs and splash
    attention on TPUs, where they do the same as ``xla``.
    """

    preset: PresetName = "nano"
    decoder: DecoderSection | None = None
    factory: Function | None = None
    settings: Settings = Field(default={}, description="given to the factory as the keyword `settings`")
    vocabulary_size: VocabularySize | None = None
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: Literal["none", "dots", "full"] = "none"
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    initial_weights: Location | None = None
    weights_digest: Digest | None = Field(
        default=None,
        description="digest of the initial weights where islands read them (trainable); filled in by the service",
    )

    @model_validator(mode="after")
    def _one_model(self) -> ModelSection:
        of_built_in = {
            "decoder": self.decoder,
            "vocabulary_size": self.vocabulary_size,
            "initial_weights": self.initial_weights,
        }
        named = [name for name, value in of_built_in.items() if value is not None]
        if self.factory is not None and named:
            raise ValueError(f"has factory and {named[0]}, which only a built-in model takes; leave one of the two out")
        _require_factory(self.factory, self.settings)
        plain = self.factory is None and isinstance(self.network, Architecture)
        if self.attention in ("cudnn", "splash") and (self.factory is not None or plain):
            own = f"the preset {self.preset!r}" if plain else f"the factory {self.factory!r}"
            raise ValueError(f"has attention {self.attention}, but {own} attends in its own way; leave attention out")
        if self.decoder is not None and self.preset != "nano":
            raise ValueError("has preset and decoder, which are two models; leave one of the two out")
        if self.initial_weights is not None and not isinstance(self.network, DecoderSection | None):
            raise ValueError(
                f"has initial_weights and the preset {self.preset!r}, which only atoll has; leave the preset out, and the "
                "weights' config.json describes the model"
            )
        return self

    @property
    def is_described_by_weights(self) -> bool:
        """Return whether only the folder of the weights says what the model is. The service reads it at submission."""
        return self.initial_weights is not None and self.decoder is None and self.preset == "nano"

    @property
    def network(self) -> Architecture | DecoderSection | None:
        """The configuration of the built-in model that is asked for; None where only a package or a folder knows it."""
        if self.factory is not None or self.is_described_by_weights:
            return None
        if self.decoder is None and self.preset in PLAIN:
            plain = PLAIN[self.preset]
            return replace(plain, vocabulary_size=self.vocabulary_size or plain.vocabulary_size)
        decoder = self.decoder or DECODERS[self.preset]
        return decoder.model_copy(update={"vocabulary_size": self.vocabulary_size or decoder.vocabulary_size})


class LoraSection(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685): of each target W only A and B of W + alpha / rank · A · B are trained.

    A target is the name of a matrix, such as ``query`` or ``attention.query``, its name in transformers, such as ``q_proj``,
    or a pattern of tensor names with ``*`` and ``?``. ``all-linear`` is every matrix of attention and hidden layers, except
    a mixture's routers and experts.
    """

    rank: AdapterRank = 16
    alpha: AdapterAlpha | None = Field(default=None, description="if absent, twice the rank")
    targets: Annotated[tuple[TensorPattern, ...], Field(min_length=1, max_length=GROUPS_MAX)] = (ALL_LINEAR,)

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, data: Any) -> Any:
        """Return the section with one target as a list, since PEFT takes one without brackets, too."""
        if isinstance(data, Mapping) and isinstance(data.get("targets"), str):
            return {**data, "targets": [data["targets"]]}
        return data

    @property
    def scale(self) -> float:
        """The factor of A · B."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


class TrainableSection(Section):
    """The part of the model that is trained: adapters (``lora``), or the tensors whose names match ``only``. Set one.

    Everything else is frozen. Each island reads it from ``model.initial_weights``, or ``trainer.model`` of kind torch, on
    its own node, which must have the files that the service has (``model.weights_digest``), or draws it from the seed if the
    job has none. It never travels: merges, checkpoints and states contain what is trained.
    """

    lora: LoraSection | None = None
    only: Annotated[tuple[TensorPattern, ...], Field(max_length=GROUPS_MAX)] = Field(
        default=(), description="patterns of tensor names, with ``*`` and ``?``"
    )

    base: Literal["nf4"] | None = Field(
        default=None,
        description="for kind: torch; nf4 holds the frozen matrices of linear layers in 4 bits; if absent, the type of "
        "computation does",
    )

    @model_validator(mode="after")
    def _one_part(self) -> TrainableSection:
        if (self.lora is None) == (not self.only):
            raise ValueError("needs exactly one of lora and only; give one of the two")
        if self.base is not None and self.lora is None:
            raise ValueError("has base, which is for adapters; leave it out, or set lora instead of only")
        return self

    def problems_of(self, trainer: str, network: Architecture | DecoderSection | None) -> Iterator[Problem]:
        """Yield the problems with this trainer and model. Tensors of a package (None) or of PyTorch are unknown here."""
        if trainer not in TRAINERS_OF_PARTS:
            message = f"is set, but the trainer {trainer} ignores it: it would train the whole model."
            yield Problem("trainable", message, "Leave it out, or use the built-in trainer, or kind: torch.")
        elif self.base is not None and trainer != TORCH_TRAINER:
            message = f"is {self.base}, but the trainer holds frozen weights in the type of computation."
            yield Problem("trainable.base", message, "Leave it out, or use trainer.kind torch.")
        elif network is not None and trainer == BUILT_IN_TRAINER:
            yield from self.problems_with(network.matrices, network.shapes)

    def problems_with(
        self, matrices: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[Problem]:
        """Yield a problem for everything to train that a model of these matrices and tensors does not have."""
        if self.lora is None:
            yield from trainable.pattern_problems(self.only, shapes)
        else:
            yield from trainable.adapter_problems(self.lora.rank, self.lora.targets, matrices)

    def trained_shapes(self, network: Architecture | DecoderSection) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of what is trained of a built-in model."""
        if self.lora is not None:
            return trainable.adapter_shapes(self.lora.rank, self.lora.targets, network.matrices)
        shapes: Mapping[str, tuple[int, ...]] = network.shapes
        return {name: shapes[name] for name in trainable.trained(self.only, shapes)}


def routers_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that are of a mixture's routers."""
    return {name: shape for name, shape in shapes.items() if is_router(name)}


class DataSection(Section):
    """The text, and its conversion to tokens. ``source: builtin`` is the source code of Python's standard library.

    ``source: files`` accepts the same kinds of files as ``sources``. Each island holds all of the text, which takes 2.5
    times its size in memory; use it for some 100 MB, and at most 2 GiB. ``source: streamed`` reads ``sources`` a few
    megabytes at a time, and each island reads only its own part.

    ``source: tokens`` reads ``sources`` that are tokens already: `.npy` (integers; one dimension, or two with a document in
    each row), Megatron-LM's `.bin`, with its `.idx` beside it, and Parquet with a list of integers in each row. The tokens
    are drawn as they are, in the order of Megatron-LM's ``GPTDataset``. Without ``held_out`` of a source, its last documents
    are held out.

    ``source: package.module:function`` calls a function of an installed package, which returns an object with ``__len__``
    and ``__getitem__``, such as a Grain ``RandomAccessDataSource``. Each element is one sequence: ``sequence_length`` + 1
    integers.

    With ``format: chat`` whole conversations are packed into sequences. Attention and positions are those of each
    conversation alone, and the loss is the mean over the tokens of ``loss_on``. Only the template writes control tokens.
    ``format: preference`` is for ``training.objective``: a record is one pair, both of which are in one sequence.

    With ``intra_document_masking`` the same applies to other data, in the same sequences as without it. A document ends at
    ``separator``: a control token; of tokens that are there already, the one that you name, or where their file says so.

    The commands of ``atoll`` accept paths relative to the specification; over REST they must be absolute, or URLs of a store
    (s3://…, gs://…). The node of every island must be able to read the files, below a root (`atoll up --data`). The same
    applies to ``tokenizer``, which is `bytes`, a `tokenizer.json` of Hugging Face's tokenizers or a `.model` of
    SentencePiece, and to ``index``, which `atoll data index` creates. Without an index islands count streamed text as they
    read it, and the length of an epoch is estimated if an island's part of a source has more than 1 GiB.
    """

    source: Literal["builtin", "files", "streamed", "tokens"] | Function = "builtin"
    settings: Settings = Field(
        default_factory=dict, description="for a source of your own: what its function gets as the keyword `settings`"
    )
    format: Literal["text", "chat", "preference"] = Field(
        default="text",
        description="chat: each record is a conversation, with `messages`, or `prompt` and `completion`, instead of a text; "
        "preference: two, `chosen` and `rejected`, with or without a `prompt`",
    )
    template: Location = Field(
        default="tokenizer",
        description="for conversations: a file with a chat template; `tokenizer`: chat_template.jinja beside the tokenizer, "
        "or what its tokenizer_config.json has",
    )
    template_digest: Digest | None = Field(
        default=None, description="digest of the template and the tokens that it names; filled in by the service"
    )
    loss_on: Literal["assistant", "all"] = Field(
        default="assistant",
        description="for conversations: the tokens that are learned; assistant: those of answers, or of the completion",
    )
    long_conversations: Literal["refuse", "skip", "cut"] = Field(
        default="refuse",
        description="for conversations: what is done with one, or with a pair, of more than `sequence_length` + 1 tokens; "
        "refuse: it counts as unreadable",
    )
    files: Annotated[tuple[Location, ...], Field(max_length=FILES_MAX)] = ()
    sources: Annotated[tuple[SourceSection, ...], Field(max_length=SOURCES_MAX)] = ()
    text_field: Word = Field(default="text", description="for source: files")
    tokenizer: Location = "bytes"
    tokenizer_digest: Digest | None = Field(
        default=None, description="digest of the tokenizer's file; filled in by the service"
    )
    separator: TokenId | None = Field(
        default=None,
        description="the token between two documents; if absent, the control token that ends a text, filled in by the "
        "service",
    )
    begin_token: TokenId | Literal["tokenizer", "none"] = Field(
        default="tokenizer",
        description="the token before each document; `tokenizer`: the one that the tokenizer itself puts before a text, if "
        "any, filled in by the service",
    )
    index: Location | None = Field(
        default=None, description="index of a streamed data set, with the token counts of its pieces"
    )
    index_digest: Digest | None = Field(default=None, description="digest of the index; filled in by the service")
    stored_bytes: Annotated[tuple[StoredBytes, ...], Field(max_length=SOURCES_MAX)] = Field(
        default=(),
        description="size of each source's files on the service's machine, if there is no index; filled in by the service",
    )
    samples: SampleCount | None = Field(
        default=None,
        description="for source: tokens: the number of samples of one order, as Megatron-LM's data sets have it; null: "
        "those of one epoch",
    )
    sequence_length: SequenceLength = 128
    intra_document_masking: bool = Field(
        default=False, description="attention and positions of each document alone, as conversations have them"
    )
    held_out_ratio: Annotated[float, Field(strict=True, ge=1e-6, lt=0.5)] = 0.02
    unreadable_max: UnreadableCount = Field(
        default=0,
        description="unreadable records (not UTF-8, or without text) and pieces of files that an island may skip; one more "
        "ends the job",
    )

    @property
    def is_own(self) -> bool:
        """Return whether a function of a package has the data."""
        return ":" in self.source

    @property
    def has_tokens(self) -> bool:
        """Return whether the data is tokens already."""
        return self.is_own or self.source == "tokens"

    @model_validator(mode="after")
    def _fits_its_format(self) -> DataSection:
        if self.format == "text":
            fields = DataSection.model_fields
            for name in ("template", "loss_on", "long_conversations"):
                if (value := getattr(self, name)) != fields[name].default:
                    raise ValueError(
                        f"has {name} {value!r} and format text; leave {name} out, or set format to chat, which has it"
                    )
        elif self.intra_document_masking:
            raise ValueError(f"has format {self.format}, which always has intra_document_masking; leave that out")
        elif self.source not in ("files", "streamed"):
            raise ValueError(
                f"has format {self.format} and source {self.source}, which has no conversations; set source to files or "
                "streamed"
            )
        elif self.index is not None:
            raise ValueError(f"has format {self.format} and an index, which counts text; leave index out")
        elif self.format == "preference" and self.long_conversations == "cut":
            raise ValueError(
                "has format preference and long_conversations cut, which would leave no pair; set it to skip"
            )
        return self

    @property
    def has_conversations(self) -> bool:
        """Return whether batches have weights, segments and positions."""
        return self.format != "text"

    @property
    def has_segments(self) -> bool:
        """Return whether batches have segments and positions."""
        return self.has_conversations or self.intra_document_masking

    @property
    def segmented_by(self) -> str:
        return f"data.format is {self.format}" if self.has_conversations else "data.intra_document_masking is true"

    def record_field(self, text_field: str) -> str:
        """Return what a record's text is: the field of this name, its conversation, or its pair of them."""
        return {"chat": CONVERSATION, "preference": PREFERENCE}.get(self.format, text_field)


class OptimizerGroupSection(Section):
    """A group of tensors with its own learning rate or weight decay. It contains the tensors that match both ``tensors``
    and ``role``.

    ``tensors`` is a pattern of names, with ``*`` and ``?``; ``role`` is the tensors' purpose. At least one is required.
    """

    tensors: TensorPattern | None = None
    role: Literal["embedding", "matrix", "vector"] | None = None
    lr_ratio: RateRatio = Field(default=1.0, description="factor of the learning rate, also for the decay")
    weight_decay: WeightDecay | None = Field(
        default=None, description="if absent, the common weight decay, which excludes embeddings and vectors"
    )

    @model_validator(mode="after")
    def _names_some(self) -> OptimizerGroupSection:
        if self.tensors is None and self.role is None:
            raise ValueError("names no tensors; give it a pattern of names, a role, or both")
        return self


class InnerOptimizerSection(Section):
    """The optimizer of every island's inner steps, with its schedule: a linear warm-up, then a decay by ``schedule`` to
    ``lr · lr_final_ratio`` at the end of the job's token budget.

    ``muon`` updates matrices by Muon and everything else by AdamW, at one learning rate, that of AdamW. For Lion use a third
    to a tenth of AdamW's rate. The first of the ``groups`` that matches a tensor applies.

    ``factory`` is ``package.module:function``, and replaces ``kind``. It gets this section as a dictionary and returns a
    complete optax optimizer, such as ``optax.adamw(3e-4)``, whose updates are added to the parameters. The optimizer has its
    own learning rate and weight decay; the schedule multiplies its updates by a factor that is 1 after warm-up and
    ``lr_final_ratio`` at the end. Gradients are clipped only if ``clip_norm`` is set. A job with a factory that ascends
    fails at its first step.
    """

    kind: Literal["adamw", "muon", "lion", "adafactor"] = "adamw"
    factory: Function | None = None
    settings: Settings = Field(default={}, description="given to the factory as the keyword `settings`")
    lr: LearningRate = 2e-3
    lr_final_ratio: Ratio = 0.1
    warmup_steps: StepCountOrNone = Field(default=50, description="steps of each island")
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    decay_ratio: Ratio = Field(
        default=0.2, description="for wsd: the share of the budget at its end during which the rate falls"
    )
    beta1: RatioBelowOne = Field(default=0.9, description="for AdamW and Lion")
    beta2: RatioBelowOne = Field(default=0.95, description="for AdamW and Lion; use 0.99 for Lion")
    momentum: RatioBelowOne = Field(default=0.95, description="for Muon")
    weight_decay: WeightDecay = 0.1
    clip_norm: GradientNorm | None = Field(
        default=1.0, description="limit of the norm of all gradients; null, the default with a factory: no limit"
    )
    groups: Annotated[tuple[OptimizerGroupSection, ...], Field(max_length=GROUPS_MAX)] = ()

    @model_validator(mode="before")
    @classmethod
    def _a_factory_clips_itself(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("factory") is not None and "clip_norm" not in data:
            return {**data, "clip_norm": None}
        return data

    @model_validator(mode="after")
    def _one_optimizer(self) -> InnerOptimizerSection:
        if self.factory is not None and "kind" in self.model_fields_set and self.kind != "adamw":
            raise ValueError(f"has kind {self.kind} and a factory, which takes its place; leave one of them out")
        _require_factory(self.factory, self.settings)
        if self.factory is not None and any(group.weight_decay is not None for group in self.groups):
            raise ValueError(
                "has a factory, whose optimizer decays weights itself, and a group with a weight_decay of its own; "
                "remove that, and use optax.add_decayed_weights with a mask in the factory"
            )
        return self


class ObjectiveSection(Section):
    """Steps minimise this instead of the loss of each next token. ``dpo`` (arXiv:2305.18290) learns from pairs of answers:
    the mean of −ln σ(beta · ((ln π(chosen) − ln π₀(chosen)) − (ln π(rejected) − ln π₀(rejected)))), where π₀ is the model
    with which the job begins. Each island holds π₀; with ``trainable.lora`` it is the frozen part of its model.
    """

    kind: Literal["dpo"]
    beta: PreferenceWeight = 0.1


class BatchRampSection(Section):
    """Every island's batch begins as one of ``parts`` equal parts of its size, and has one more after every
    ``tokens``/(``parts`` − 1) tokens of all islands together, so that it is whole when they have trained ``tokens``.

    A batch has the same place in the data whatever part of it is trained; the rest of it is left out. The schedule of the
    learning rate goes by tokens. The trainer compiles a step of each size before the first one.
    """

    parts: BatchParts
    tokens: TokenCount


class TrainingSection(Section):
    """The inner steps of one island. ``batch_size`` is in sequences for one island.

    ``tokens_per_step`` says the same for all islands that the job begins with: each gets an equal share of it as its batch,
    however many there are. An island that is added later brings a batch of that size besides.

    With ``accumulation`` a step processes its batch in that many equal parts, one after another: activations take less
    memory, and the result is the same. Decoder models add ``z_loss`` times the mean of log²Z to their objective, where Z is
    the sum of the exponentials of a position's logits (arXiv:2204.02311, section 5). Reported losses do not include it.
    """

    batch_size: SequenceCount = 8
    tokens_per_step: TokenCount | None = Field(
        default=None, description="tokens of one inner step of all islands together; it sets batch_size"
    )
    batch_ramp: BatchRampSection | None = Field(default=None, description="if absent, every batch is whole")
    objective: ObjectiveSection | None = Field(default=None, description="if absent, the loss of each next token")
    accumulation: MicrobatchCount = Field(default=1, description="number of parts of a batch; must divide batch_size")
    z_loss: Ratio = 0.0
    inner_optimizer: InnerOptimizerSection = InnerOptimizerSection.model_construct()


class TrainerSection(Section):
    """The code that trains an island; if absent, the built-in trainer of JAX models.

    ``kind: torch`` trains ``model`` in PyTorch (`pip install 'atoll[torch]'`): a folder that transformers'
    AutoModelForCausalLM loads (`config.json`, `*.safetensors`), or ``package.module:function`` of a package that the
    service allows (`atoll up --allow`), which is called with the specification as plain data and returns a
    torch.nn.Module that maps tokens to logits. A folder without weights is a model that starts from the job's seed.
    ``settings`` are for the function, or replace fields of the folder's config.json. Every node, and the service's
    machine, needs the folder, below a root (`atoll up --data`).

    ``factory`` is ``package.module:function`` of a package that the service allows. The function is called with the
    specification as plain data, the number of the island's data shard, and the number of shards, and returns a trainer. With
    no settings, ``trainer: package.module:function`` says the same.
    """

    kind: Literal["torch"] | None = Field(default=None, description="if absent, the factory's trainer")
    factory: Function = BUILT_IN_TRAINER
    model: Location | None = Field(default=None, description="for kind: torch; a folder or package.module:function")
    settings: Settings = Field(default={}, description="given to the factory, or the model's function, as `settings`")

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, data: Any) -> Any:
        if isinstance(data, str):
            if not is_function(data):
                raise ValueError(f"is {brief(data)}, but must be package.module:function; change it")
            data = {"kind": "torch"} if data == TORCH_TRAINER else {"factory": data}
        if isinstance(data, Mapping) and data.get("kind") == "torch" and "factory" not in data:
            return {**data, "factory": TORCH_TRAINER}
        return data

    @model_validator(mode="after")
    def _one_trainer(self) -> TrainerSection:
        if self.kind is None:
            if self.model is not None:
                raise ValueError("has a model, which only kind: torch takes; add kind: torch, or see the section model")
            _require_factory(None if self.is_built_in else self.factory, self.settings)
        elif self.factory != TORCH_TRAINER:
            raise ValueError("has kind and factory, which are two trainers; leave one of the two out")
        elif self.model is None:
            raise ValueError("has kind torch and no model; name a folder of transformers, or package.module:function")
        elif "://" in self.model:
            raise ValueError(f"has the model {self.model!r} in a store; copy it to the same folder on every machine")
        return self

    @model_serializer(mode="wrap")
    def _as_short_as_possible(self, as_mapping: SerializerFunctionWrapHandler) -> Any:
        if self.kind is None and not self.settings:
            return self.factory
        document = as_mapping(self)
        own = ("kind", "model", "settings") if self.kind == "torch" else ("factory", "settings")
        return {name: document[name] for name in own}

    @property
    def is_built_in(self) -> bool:
        return self.factory == BUILT_IN_TRAINER

    @property
    def is_synthetic(self) -> bool:
        return self.factory == SYNTHETIC_TRAINER

    @property
    def folder(self) -> str | None:
        """Return the folder of a torch trainer's model; None if a function makes it."""
        return self.model if is_folder(self.model) else None

    @property
    def reads_text(self) -> bool:
        """Return whether the trainer reads the section ``data``; a package's trainer may read anything."""
        return self.is_built_in or self.kind == "torch"


def is_folder(model: Any) -> bool:
    """Return whether ``trainer.model`` is a folder."""
    return isinstance(model, str) and not is_function(model)


def is_function(model: str) -> bool:
    """Return whether ``trainer.model`` is ``package.module:function``, and not a folder."""
    return re.fullmatch(FUNCTION, model, re.ASCII) is not None


def _require_factory(factory: str | None, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that no factory gets."""
    if settings and factory is None:
        raise ValueError("has settings, which only a factory takes; name the factory, or remove them")


def objective_problems(training: TrainingSection, data: DataSection, trainer: TrainerSection) -> Iterator[Problem]:
    """Yield a problem for an objective without its data or trainer, and for pairs without an objective."""
    if training.objective is None:
        if data.format == "preference":
            remedy = "Add training.objective, such as {kind: dpo, beta: 0.1}, or set data.format to chat."
            yield Problem("data.format", "is preference, but no objective learns from pairs.", remedy)
        return
    kind = training.objective.kind
    if data.format != "preference":
        message = f"is {kind}, which learns from pairs, but data.format is {data.format}."
        yield Problem(
            "training.objective.kind", message, "Set data.format to preference, or leave training.objective out."
        )
    if not trainer.is_built_in:
        message = f"is {kind}, but the trainer {trainer.factory} has no such objective."
        yield Problem("training.objective.kind", message, "Use the built-in trainer, or leave training.objective out.")
    if training.z_loss:
        message = f"is {training.z_loss:g}, but training.objective.kind is {kind}, which has no such term."
        yield Problem("training.z_loss", message, "Set it to 0.")
