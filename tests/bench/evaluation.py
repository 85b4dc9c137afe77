"""The time of an evaluation relative to the merges between two of them: for all held-out sequences, and for as many as an
island may pause for.

A fragment merges every H / P steps, so the merges between two evaluations take ``every_merges`` times as long. `small`
has 126 million parameters, and a small machine steps and measures it within a minute. ``--parameters 5e8`` makes its
layers wider, and takes a machine of 24 GiB some minutes.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from learners import jax_trainer
from orchestrator.models.presets import Architecture
from orchestrator.specification import training_sections
from tests.bench.goals import Goal, at_most
from tests.bench.one_island import seconds_of, specification
from tests.bench.options import Options

RATIO_GOAL = 1.0
ISLAND_RATIO_GOAL = 0.03
"""The limit is 0.02. The last batch may end beyond it."""
STEPS = 3


def main(asked: Options) -> list[Goal]:
    if asked.parameters is not None:
        training_sections.PLAIN = {**training_sections.PLAIN, "small": _architecture(asked.parameters)}
    spec = specification(asked, training={"batch_size": 2}, evaluation={"sequences": 32, "on": "islands"})
    trainer = jax_trainer.create(spec.model_dump(mode="json"), 0, 1)
    trainer.warm_up()
    step_s = median(seconds_of(lambda: trainer.step(0)) for _ in range(STEPS))
    knobs, section = spec.synchroniser, spec.evaluation
    merges_s = section.every_merges * max(1.0, knobs.interval_steps / knobs.fragments) * step_s
    held = trainer.snapshot(trainer.tensor_shapes()).arrays()
    whole, part = (trainer.evaluate(held, limit_s) for limit_s in (merges_s, section.time_ratio * merges_s))
    judged = [
        at_most("evaluation over the merges between two", whole.seconds / merges_s, RATIO_GOAL),
        at_most("evaluation on an island over the merges between two", part.seconds / merges_s, ISLAND_RATIO_GOAL),
    ]
    parameters = sum(array.size for array in held.values())
    print(
        f"evaluation {parameters / 1e6:.1f}M parameters, a step {step_s:.2f} s, "
        f"{section.every_merges} merges {merges_s:.0f} s: "
        f"{whole.sequence_count} sequences {whole.seconds:.2f} s, {whole.seconds / merges_s:.3f} of that ({judged[0]}); "
        f"on an island {part.sequence_count} sequences {part.seconds:.2f} s, {part.seconds / merges_s:.3f} ({judged[1]})"
    )
    return judged


def _architecture(parameters: int) -> Architecture:
    """Return an architecture of ``small``'s depth with about so many parameters: a layer has twelve times its width
    squared.
    """
    small = training_sections.PLAIN["small"]
    heads = round((parameters / (12 * small.layer_count)) ** 0.5 / small.head_size)
    return replace(small, width=max(1, heads) * small.head_size)
