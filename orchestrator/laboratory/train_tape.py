"""Real training in one process, driven by a tape: what the tape's failures do to the model.

    python -m orchestrator.laboratory.train_tape TAPE --config FILE [--baseline no-failures] [--baseline data-parallel]

The tape, live or simulated, decides who trains how long between which adoptions, who contributes to which merge with which
weight, who is away and from whom it catches up; the job specification FILE says what is trained. Baselines for the table:

    no-failures      the same islands and policy in a simulated world without faults, nobody away, as many tokens trained,
                     and the end like the tape's: with a flush, or in the middle (``no_fault_twin``)
    data-parallel    one model, every island's batch in each step, the same token budget

With ``--seeds N`` all of it is trained from N seeds, the job's and those after it, and the table says the mean.

Finished runs are kept in ``runs/train-tape-NAME/`` as they end, so Ctrl-C loses at most the run under way and the next
call goes on. ``--again`` trains once more what is kept, and says whether the bits agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from learners import jax_trainer
from orchestrator.accounting.goodput import Goodput
from orchestrator.errors import AtollError, InternalError
from orchestrator.laboratory import baselines, matching, no_fault_twin
from orchestrator.laboratory.finished_runs import FinishedRuns, key_of, progress
from orchestrator.laboratory.matching import Match
from orchestrator.laboratory.tape_table import METHODS, Method, Run, digests, judge, means, table
from orchestrator.laboratory.tape_training import TapeTraining
from orchestrator.specification.config import JobSpec, parse_job, read_job_document
from orchestrator.specification.data_check import with_found_files
from orchestrator.system.roots import EVERYTHING
from orchestrator.system.run_folder import TAPE
from orchestrator.tape.schema import Digest, Header, Tape, encode_header, encode_record, job_steps
from orchestrator.tape.storage import read_tape


class TapeRuns:
    """The runs that one tape and one job specification ask for."""

    def __init__(self, tape: Tape, match: Match, folder: Path, console: Console) -> None:
        self._tape, self._match, self._console = tape, match, console
        self._finished = FinishedRuns(folder, Run)

    def train(self, methods: Sequence[Method], *, again: bool) -> list[Run]:
        """Every method in turn; what is kept from an earlier call only if ``again``."""
        with progress(self._console) as shown:
            return [self._run(method, shown, again) for method in methods]

    def _run(self, method: Method, shown: Progress, again: bool) -> Run:
        spec, tape = self._match.spec, self._tape
        if method == "no-failures":
            tape = no_fault_twin.tape_of(tape, self._match.trace, spec.synchroniser.adoption, spec.horizon_steps)
        # what is trained by a tape depends on all of it; data-parallel only on the budget, which is the specification's
        decides = "" if method == "data-parallel" else digest_of(tape)
        key = key_of(method, decides, spec.model_dump_json())
        finished = self._finished.get(key)
        if finished is not None and not again:
            return finished
        task = shown.add_task(method, total=spec.token_budget)
        match method:
            case "tape":
                steps = _by_tape(method, key, tape, self._match)
            case "no-failures":
                steps = _by_tape(method, key, tape, matching.match(tape, spec))
            case "data-parallel":
                steps = _data_parallel(key, spec)
        run = _followed(steps, lambda tokens: shown.update(task, completed=tokens))
        if finished is not None:
            same = "the same bits as" if finished.digest == run.digest else "OTHER BITS than"
            self._console.print(f"{method}: {same} in the finished run of before ({run.digest}, {finished.digest}).")
        return self._finished.keep(run)


def _followed(steps: Generator[int, None, Run], show: Any) -> Run:
    """Train to the end, showing the tokens."""
    while True:
        try:
            show(next(steps))
        except StopIteration as end:
            run: Run = end.value
            return run


def _by_tape(method: Method, key: str, tape: Tape, match: Match) -> Generator[int, None, Run]:
    training = TapeTraining(match.spec, match.trace, _warm_trainer)
    for step, _ in enumerate(training.run(), start=1):
        yield step * match.spec.tokens_per_step
    trained, inputs = training.trained, [len(act.inputs) for act in match.trace.merges]
    assert trained is not None
    return Run(
        method=method,
        key=key,
        loss=trained.loss,
        curve=tuple(trained.curve),
        tokens=match.tokens_trained,
        goodput_ratio=goodput_of(tape),
        digest=trained.digest,
        merge_count=len(inputs),
        contributors_mean=sum(inputs) / len(inputs),
        as_recorded_count=trained.as_recorded_count,
    )


def _data_parallel(key: str, spec: JobSpec) -> Generator[int, None, Run]:
    result = None
    for advance in baselines.train("data-parallel", spec, baselines.Pace()):
        yield advance.tokens
        result = advance.result
    assert result is not None
    tokens = result.curve[-1][0]
    return Run("data-parallel", key, result.loss, result.curve, tokens, result.goodput_ratio, result.digest)


def _warm_trainer(spec: dict[str, Any], shard_index: int, shard_count: int) -> jax_trainer.JaxTrainer:
    """Compiled through the persistent cache: all islands train the same program."""
    trainer = jax_trainer.create(spec, shard_index, shard_count)
    trainer.warm_up()
    return trainer


def goodput_of(tape: Tape) -> float:
    """As the tape's own report says it: island-time whose tokens reached a merge, over all."""
    assert isinstance(tape.header, Header)
    fold = Goodput(tape.header.policy)
    for event, effects in job_steps(tape):
        fold.apply(event, effects)
    ratio: float = fold.summary()["goodput_ratio"]
    return ratio


def digest_of(tape: Tape) -> str:
    """The digest of the tape's records, whether or not it was sealed."""
    if tape.footer is not None:
        return tape.footer.digest
    digest = Digest()
    digest.add(encode_header(tape.header))
    for record in tape.records:
        digest.add(encode_record(record))
    return digest.hex()


def _of_seed(match: Match, seed: int) -> Match:
    """The same training from another start, on the same data in another order."""
    return replace(match, spec=match.spec.model_copy(update={"seed": seed}))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="atoll train-tape", description=__doc__.splitlines()[0])
    parser.add_argument("tape", type=Path, help="a tape.jsonl, or the folder of a run")
    parser.add_argument("--config", type=Path, required=True, help="the job specification: model, data, optimizers")
    parser.add_argument("--baseline", action="append", choices=METHODS[1:], default=[])
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="train from N seeds, the job's and on")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--again", action="store_true", help="train finished runs anew, and compare the bits")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    folder = options.runs / "train-tape"
    try:
        spec = with_found_files(parse_job(read_job_document(options.config)), EVERYTHING)
        tape = read_tape(options.tape / TAPE if options.tape.is_dir() else options.tape)
        match = matching.match(tape, spec)
        for note in match.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        folder = options.runs / f"train-tape-{spec.name}"
        methods: list[Method] = ["tape", *(method for method in METHODS if method in options.baseline)]
        rows = []
        for seed in range(spec.seed, spec.seed + max(1, options.seeds)):
            runs = TapeRuns(tape, _of_seed(match, seed), folder, console).train(methods, again=options.again)
            rows += judge(seed, runs)
    except KeyboardInterrupt:
        console.print(f"Stopped. Finished runs are kept in {folder}; the same command goes on from there.")
        return 130
    except AtollError as error:
        console.print(str(error), style="red", markup=False)
        return 1 if isinstance(error, InternalError) else 2
    if options.json:
        plain = [{**asdict(row.run), "seed": row.seed, "gap": row.gap} for row in rows]
        over_seeds = [asdict(mean) for mean in means(rows)]
        json.dump({"job": spec.name, "notes": match.notes, "rows": plain, "means": over_seeds}, sys.stdout, indent=2)
        print()
    else:
        out = Console()
        out.print(table(match, rows))
        out.print(digests(rows), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
