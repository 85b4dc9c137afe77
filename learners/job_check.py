"""Checks what a job would run, without a cluster: builds its model, optimizer and text as an island does.

   python -m learners.job_check < SPECIFICATION.json > FINDINGS.json      as ``JobSpec.island_document`` of an entry

It is a process of its own because code of the specification's packages runs here, as in islands. It builds the trainer of
the job's first entry, traces one inner step and draws one batch. Nothing is compiled or trained. It reports all problems
together. What such code prints goes to stderr. Node groups and memory are checked elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import prod
from typing import Any

from learners import tokenizer
from learners.contract import Batch
from learners.factories import trainer_of
from learners.island_spec import IslandSpec
from learners.text import Text
from orchestrator.errors import ConfigurationError, InvalidJobSpec, Problem, UnfitWeights, in_words, is_interrupt
from orchestrator.models.huggingface.weights import FIELD as WEIGHTS
from orchestrator.parameters import fragment_map
from orchestrator.system.roots import EVERYTHING

SHOWN_TOKENS = 64
FIELD = re.compile(r"(trainer|[a-z_]+(?:\.[a-z_0-9]+)+):? (.*)", re.DOTALL)
"""The beginning of our own errors about a specification."""


def findings(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the job would run and the problems found. ``model`` and ``data`` are present if they work."""
    spec = IslandSpec.of({**document, "roots": EVERYTHING})
    problems: list[Problem] = []
    texts: list[Text] = []  # of the trainer: it knows how many tokens the model has
    result: dict[str, Any] = {"model": _attempted(lambda: _model(spec, texts), problems)}
    if spec.job.trainer.reads_text:
        result["data"] = _attempted(lambda: _data(spec, texts[0] if texts else Text(spec)), problems)
    return result | {"problems": [asdict(problem) for problem in dict.fromkeys(problems)]}


def _attempted(work: Callable[[], dict[str, Any]], problems: list[Problem]) -> dict[str, Any] | None:
    try:
        return work()
    except InvalidJobSpec as error:
        problems += error.problems
    except UnfitWeights as error:
        problems.append(Problem(WEIGHTS, error.detail, error.remedy))
    except ConfigurationError as error:
        about = FIELD.fullmatch(str(error))
        problems.append(Problem(about[1], about[2], "") if about else Problem("the job", in_words(error), ""))
    except BaseException as error:
        if is_interrupt(error):
            raise
        problems.append(Problem("the job", f"{in_words(error).rstrip('.')}.", "Its traceback is above."))
        sys.excepthook(type(error), error, error.__traceback__)
    return None


def _model(spec: IslandSpec, texts: list[Text]) -> dict[str, Any]:
    trainer = trainer_of(spec, 0, spec.job.island_count)
    if isinstance(text := getattr(trainer, "text", None), Text):
        texts.append(text)
    shapes = dict(trainer.tensor_shapes())
    sync = spec.job.synchroniser
    fragments = fragment_map.build(shapes, sync.fragments, trainer.roles(), sync.routers_apart)
    sizes = fragment_map.sizes(fragments, shapes)
    if hasattr(trainer, "trace"):
        trainer.trace()
    shared = sizes[: sync.schedule.shared_count]
    return {
        "parameters": sum(map(prod, shapes.values())),
        "tensors": len(shapes),
        "fragments": len(sizes),
        "fragment_parameters_min": min(shared),
        "fragment_parameters_max": max(shared),
        "router_fragment_parameters": sizes[-1] if sync.routers_apart else None,
    }


def _data(spec: IslandSpec, text: Text) -> dict[str, Any]:
    section = spec.job.data
    tokens = Batch.of(text.draw(0, spec.job.island_count)(0)).tokens
    held_out, own = text.held_out_batches(1), tokenizer.load(section, EVERYTHING)
    first = [int(token) for token in tokens[0, :SHOWN_TOKENS]]
    return {
        "tokenizer": section.tokenizer,
        "vocabulary_size": own.vocabulary_size,
        "separator": int(own.separator),
        "batch_shape": [tokens.shape[0], tokens.shape[1] - 1],
        "held_out_sequences": sum(map(len, held_out)),
        "first_tokens": first,
        "first_text": own.decode(first) if max(first) < own.vocabulary_size else "",
        "flaws": asdict(text.flaws()),
    }


def main() -> int:
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of a package's code is not part of the answer
    with answer:
        json.dump(findings(json.load(sys.stdin)), answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
