"""The salvage of a job whose synchroniser's machine is gone with its disk: asking islands, and pulling Θ from them.

    survey    which islands answer, and what they hold; from then on they listen to no earlier synchroniser
    pulled    the bytes of each chosen version, through the job's channel, with their digests compared
    momentum  from the newest checkpoint that can be reached here, else zeros

What goes on is decided in ``core.salvage``. The controller, which lives on another machine, knows the islands' processes and
whether the job ever had Θ: a job that had is never begun anew. A *mark* in the run folder says that a salvage is under
way, so that a synchroniser that dies before the new tape has Θ salvages again, in a later epoch.

Residues are not taken from a checkpoint. What an earlier version's update lost in its codec was paid by the updates after
it, which Θ contains; adding it again would be an error of the same size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import ray
from ray.exceptions import RayError

from orchestrator.actors import ActorHandle, IslandInterface, ModelOutline
from orchestrator.channel.endpoint import Carried, Endpoint
from orchestrator.channel.frames import SHARD
from orchestrator.checkpoints import resumption, writing
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import MANIFEST
from orchestrator.checkpoints.manifest import decode as decode_manifest
from orchestrator.checkpoints.reading import outer_states
from orchestrator.checkpoints.resumption import CHANGEABLE, Resumption, commands_of
from orchestrator.checkpoints.writing import momentum_name
from orchestrator.core.commands import UNCHANGED, ChangedSettings, Set
from orchestrator.core.messages import IslandHoldings
from orchestrator.core.salvage import (
    Choice,
    ChosenVersion,
    changed_settings,
    last_incarnations,
    latest,
    next_epoch,
    settled,
    survivors,
    tokens_trained,
)
from orchestrator.core.saving import JobSalvaged, LostVersion
from orchestrator.core.vocabulary import Epoch, FragmentId, Incarnation, IslandId, JobPolicy, Life, NodeGroupId, Version
from orchestrator.errors import AtollError, DataError, FilesElsewhere, TransferError, first_line, in_words
from orchestrator.host import job_files
from orchestrator.host.job_context import JobContext
from orchestrator.parameters import fragment_map, wire_format
from orchestrator.parameters.journal import Facts
from orchestrator.parameters.outer_state import FragmentState, NotFinite, OuterState, OuterStep, initial_state
from orchestrator.parameters.tensors import Tensors, digest
from orchestrator.parameters.wire_format import InvalidPayload
from orchestrator.runtime import cluster
from orchestrator.runtime.controller import Controller
from orchestrator.runtime.controllers import controller_of_open
from orchestrator.runtime.head_copies import head_of
from orchestrator.runtime.run_copies import Incomplete, RunFileFacts, files_of, whole_file
from orchestrator.runtime.shard_actor import ShardActor, answer_of
from orchestrator.runtime.shard_worker import JobChannel
from orchestrator.runtime.supervision import Past
from orchestrator.specification.config import JobSpec
from orchestrator.system.ports import Reach, reach
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import CHECKPOINTS, history_of, set_aside

log = logging.getLogger(__name__)
CONTROLLER_S = 15.0
ANSWER_S, BUSY_S = 2.0, 8.0
"""How long islands have to say which epoch they follow: the first, and the second in addition if their machines answer.
Merges wait meanwhile, and nothing else does."""
DIGESTS_S = 60.0
"""The digests of all that an island holds may take as long: some gigabytes a second."""
PATIENCE_S = 120.0
SETTLE_S = 2.0
"""An island that is adopting a version has it whole within so long."""
RETRY_S = 1.0
ZEROS = "zeros"
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Survey:
    """The islands that answered. ``epoch`` is newer than any island heard.

    ``lives`` are those that may have processes, and ``last_incarnations`` are the highest that there have been.
    """

    epoch: Epoch
    answers: tuple[IslandHoldings, ...]
    lives: tuple[Life, ...]
    last_incarnations: Mapping[IslandId, Incarnation]
    actors: Mapping[Life, ActorHandle[IslandInterface]]
    checkpoint_count: int = 0


@dataclass(frozen=True, slots=True)
class Salvage:
    """The result: the first event of the new tape, Θ, the steps of its versions, the lives that go on, and the settings."""

    event: JobSalvaged
    outer: OuterState
    steps: Mapping[FragmentId, int]
    survivors: frozenset[Life]
    settings: list[Set]


def survey(job: str, run_dir: Path, spec: JobSpec, roots: AllowedRoots) -> Survey | None:
    """Ask the job's islands what they hold, if the run folder has nothing to continue from but the job has a past.

    A folder that has only copies, or the files of an earlier history, has nothing to continue from: the job moved on.
    Returns None for a job that begins, and for one with files of its own. A survey without answers is that of a job that
    begins again, because its first synchroniser was lost before there was Θ. Raises DataError if the job had Θ and no island
    answers for ``PATIENCE_S``. Raises FilesElsewhere if there are no islands to ask, as after the loss of a whole cluster.
    """
    is_lost = job_files.lacks_a_past(run_dir)
    if not is_lost and not spec.synchroniser.node_groups:
        return None
    began, past = time.monotonic(), past_of(job)
    own_history = history_of(run_dir)
    if not is_lost and past is not None and past.history > own_history:
        log.warning("the files here are those of epoch %d, but the job moved on in epoch %d", own_history, past.history)
        is_lost = True
    if not is_lost or past is None:
        return None
    while True:
        result = _survey(past)
        if result is not None and result.answers:
            job_files.begin_salvage(run_dir)
            log.warning(
                "the files of this job are lost with their machine: %d islands hold Θ, and epoch %d continues from it",
                len(result.answers),
                result.epoch,
            )
            return result
        if not past.had_theta:
            if own_history:
                set_aside(run_dir)
            return result  # it begins anew, in an epoch in which its islands say again that they are ready
        if not past.names and spec.synchroniser.node_groups:
            raise FilesElsewhere(
                detail=f"The files of job {job} are on another machine, and no process of an island is known that holds its "
                "parameters.",
                remedy="The service makes the synchroniser again where the files are.",
            )
        if time.monotonic() - began > PATIENCE_S:
            raise DataError(
                detail=f"The files of job {job} are lost with the machine of its synchroniser, and no island that holds "
                f"its parameters has answered for {PATIENCE_S:.0f} s. {_how_to_continue(roots, job, run_dir, spec)}"
            )
        time.sleep(RETRY_S)
        past = past_of(job) or past


def _how_to_continue(roots: AllowedRoots, job: str, run_dir: Path, spec: JobSpec) -> str:
    try:
        newest = resumption.find(
            roots, writing.root_of(spec.checkpoints.folder, job, run_dir), spec.model_dump(mode="json")
        )
    except (AtollError, OSError, ValueError) as error:
        log.warning("no checkpoint of this job can be read here: %s", in_words(error))
        return f"If `atoll checkpoints {job}` lists one, continue from it with `atoll submit FILE --resume {job}`."
    return resumption.how_to_continue(job, run_dir, newest.url)


def past_of(job: str) -> Past | None:
    """Return what is known of the job's past; None if it has none.

    A controllers' process that died knows nothing. Then islands that Ray knows are evidence of a past.
    """
    controller = controller_of_open(job, CONTROLLER_S)
    past = None if controller is None else ray.get(controller.call(Controller.past), timeout=CONTROLLER_S)
    if past is not None and (past.history or past.had_theta or past.names):
        return past
    names = cluster.islands_of(job)
    return Past(had_theta=True, names=names, last_incarnations=last_incarnations(names)) if names else past


def _survey(past: Past) -> Survey | None:
    actors = {life: actor for life, name in past.names.items() if (actor := cluster.actor_named(name)) is not None}
    epochs = _answered(
        {life: actor.call(IslandInterface.holdings, Epoch(0)) for life, actor in actors.items()}, ANSWER_S, actors
    )
    if not epochs:
        return None
    epoch = next_epoch(newest for newest, _ in epochs.values())
    calls = {life: actors[life].call(IslandInterface.holdings, epoch) for life in epochs}
    answers = [holdings for _, holdings in _answered(calls, DIGESTS_S).values() if holdings is not None]
    of_latest = latest(answers, past.last_incarnations)
    lives = tuple(sorted(past.names))
    return Survey(epoch, of_latest, lives, past.last_incarnations, actors, past.checkpoint_count)


def _busy(
    calls: Mapping[Life, ray.ObjectRef[Answer]], actors: Mapping[Life, ActorHandle[IslandInterface]]
) -> list[Life]:
    """Return the lives that have not answered although their machines take connections."""
    waiting = [life for life, call in calls.items() if not ray.wait([call], timeout=0)[0]]
    addresses = [address for life in waiting if (address := cluster.address_of(actors[life])) is not None]
    if not addresses:
        return []
    with ThreadPoolExecutor(len(addresses)) as pool:
        taken = {
            address
            for address, reached in zip(addresses, pool.map(lambda at: reach(*at), addresses), strict=True)
            if reached is Reach.TAKEN
        }
    return [life for life in waiting if cluster.address_of(actors[life]) in taken]


def _answered(
    calls: Mapping[Life, ray.ObjectRef[Answer]],
    within_s: float,
    patient_with: Mapping[Life, ActorHandle[IslandInterface]] | None = None,
) -> dict[Life, Answer]:
    """Return the answers that come in time: ``BUSY_S`` later from processes whose machines take connections."""
    answers: dict[Life, Answer] = {}
    if not calls:
        return answers
    ready, waiting = ray.wait(list(calls.values()), num_returns=len(calls), timeout=within_s)
    if waiting and patient_with is not None and (busy := [calls[life] for life in _busy(calls, patient_with)]):
        ready += ray.wait(busy, num_returns=len(busy), timeout=BUSY_S)[0]
    for life, call in calls.items():
        if call in ready:
            try:
                answers[life] = ray.get(call)
            except RayError as error:
                log.info("%s.%s does not say what it holds: %s", *life, first_line(error))
    return answers


def salvage(
    result: Survey, context: JobContext, policy: JobPolicy, channel: JobChannel, outline: ModelOutline
) -> Salvage:
    """Pull the chosen versions. Raises DataError if a fragment cannot be had from any island, nor from a checkpoint."""
    spec, sync = context.spec, context.spec.synchroniser
    names = fragment_map.build(outline.shapes, sync.fragments, outline.roles, sync.routers_apart)
    pulled: dict[tuple[FragmentId, Version, str], FragmentState] = {}
    lives = {answer.island: answer.life for answer in result.answers}

    def pull(one: ChosenVersion, island: IslandId) -> str:
        """Get the version from this island. Return why that failed; empty if it did not."""
        life = lives[island]
        try:
            arrays = _bytes_of(one, life, result.actors[life], context.epoch, channel)
            if digest(arrays) != one.digest:
                raise InvalidPayload(detail="the bytes have another digest")
            state = initial_state(arrays, OuterStep.of(spec.synchroniser), outline.roles)
        except (RayError, TimeoutError, TransferError, InvalidPayload, NotFinite, DataError) as error:
            why = f"it did not give version {one.version} of fragment {one.fragment}: {in_words(error)}"
            log.warning("%s: %s", island, why)
            return why
        pulled[one.fragment, one.version, one.digest] = replace(state, version=one.version)
        return ""

    choice = settled(result.answers, len(names), pull)
    if missing := sorted(set(range(len(names))) - {int(one.fragment) for one in choice.chosen}):
        raise DataError(
            detail=f"The files of job {context.job} are lost with the machine of its synchroniser, and no island has a "
            f"version of the fragments {missing} that another one, or its own announcement, confirms. "
            f"{_how_to_continue(context.roots, context.job, context.run_dir, spec)}"
        )
    states = {one.fragment: pulled[one.fragment, one.version, one.digest] for one in choice.chosen}
    momentum, source, checkpoint_count, saved = _momentum(spec, context)
    for p, own in momentum.items():
        if own.keys() == states[p].momentum.keys():
            states[p] = replace(states[p], momentum=own)
    event = _event(result, choice, context, policy, (source, checkpoint_count))
    going_on = frozenset((one.island, one.incarnation) for one in event.islands)
    steps = {one.fragment: one.step for one in choice.chosen}
    settings = commands_of(changed_settings(result.answers, saved), (*CHANGEABLE, "cost_max"))
    return Salvage(event, OuterState.restored(states, OuterStep.of(spec.synchroniser)), steps, going_on, settings)


def _bytes_of(
    one: ChosenVersion, life: Life, actor: ActorHandle[IslandInterface], epoch: Epoch, channel: JobChannel
) -> Tensors:
    ray.get(actor.call(IslandInterface.join_channel, epoch, channel.membership(life)), timeout=DIGESTS_S)
    carried: Carried | None = ray.get(
        actor.call(IslandInterface.give_outer, epoch, one.fragment, one.version), timeout=DIGESTS_S
    )
    if carried is None:
        raise DataError(detail="it holds another version by now")
    return wire_format.parse(channel.endpoint.received(carried)).all_decoded()


@dataclass(frozen=True, slots=True)
class TakenFragments:
    """The result of ``salvage_shard``: where momentum comes from, and the versions that no island had."""

    momentum: str
    lost: tuple[LostVersion, ...]


def salvage_shard(
    context: JobContext,
    shard: ActorHandle[ShardActor],
    announced: Mapping[FragmentId, Sequence[Facts]],
    endpoint: Endpoint,
) -> TakenFragments:
    """Have a shard without its journal pull the versions that were announced from islands. ``ShardActor.go_on`` follows.

    ``announced`` are the last two versions of each fragment. The bytes go from the island to the shard. The synchroniser
    lives, so it knows the digest of what it announced, and no vote among islands is needed. If no island has the last
    version, its merge is lost: the shard takes the one before. Raises DataError if nobody has that either.
    """
    momentum, lost = _give_momentum(context, shard, list(announced), endpoint), []
    for fragment, versions in announced.items():
        began = time.monotonic()
        is_own = answer_of(shard.call(ShardActor.take_own, versions[-1]))
        while not (is_own or _taken_from_islands(context, shard, versions[-1])):
            waited_s = time.monotonic() - began
            if len(versions) > 1 and waited_s > SETTLE_S:
                is_there = answer_of(shard.call(ShardActor.take_own, versions[0]))
                if is_there or _taken_from_islands(context, shard, versions[0]):
                    lost.append(LostVersion(fragment, versions[-1].version, "no island had its bytes"))
                    break
            if waited_s > PATIENCE_S:
                raise DataError(
                    detail=f"The journal of fragment {fragment} is lost with its shard's disk, and no island has had "
                    f"version {versions[-1].version} or the one before for {PATIENCE_S:.0f} s. "
                    f"{_how_to_continue(context.roots, context.job, context.run_dir, context.spec)}"
                )
            time.sleep(RETRY_S)
    return TakenFragments(momentum, tuple(lost))


def _taken_from_islands(context: JobContext, shard: ActorHandle[ShardActor], wanted: Facts) -> bool:
    """Have the shard pull this version from one island after another, and return whether it has it.

    Raises what the calls of the shard raise.
    """
    fragment = FragmentId(wanted.fragment)
    for life, name in cluster.islands_of(context.job).items():
        if (actor := cluster.actor_named(name)) is None:
            continue
        try:
            call = actor.call(IslandInterface.give_outer, context.epoch, fragment, wanted.version)
            carried: Carried | None = ray.get(call, timeout=ANSWER_S)
        except (RayError, TimeoutError) as error:
            log.info("%s.%s does not give fragment %d: %s", *life, fragment, first_line(error))
            continue
        if carried is None:
            continue
        if not (why := answer_of(shard.call(ShardActor.take_parameters, wanted, carried))):
            return True
        log.warning("%s.%s did not give version %d of fragment %d: %s", *life, wanted.version, fragment, why)
    return False


def _give_momentum(
    context: JobContext, shard: ActorHandle[ShardActor], fragments: Sequence[FragmentId], endpoint: Endpoint
) -> str:
    """Give the shard the momentum of these fragments from the newest checkpoint. Return where it comes from."""
    try:
        newest = _newest_checkpoint(context)
        for p, state in enumerate(outer_states(newest.folder(context.roots), newest.manifest)):
            if p in fragments:
                payload = endpoint.payload(f"momentum/{p}", wire_format.encode(state.momentum))
                answer_of(shard.call(ShardActor.take_momentum, FragmentId(p), payload.carried(SHARD)))
    except (AtollError, OSError, ValueError) as error:
        log.info("momentum begins at zero: %s", in_words(error))
        return ZEROS
    return newest.url


def _newest_checkpoint(context: JobContext) -> Resumption:
    """Return the newest checkpoint that is reachable and sound. Raises AtollError, OSError or ValueError."""
    url = writing.root_of(context.spec.checkpoints.folder, context.job, context.run_dir)
    return resumption.find(context.roots, url, context.spec.model_dump(mode="json"))


def _momentum(spec: JobSpec, context: JobContext) -> tuple[dict[FragmentId, Tensors], str, int, ChangedSettings]:
    """Return the momentum of the newest checkpoint that is reachable and intact, where it comes from, the highest number
    of a checkpoint there, and the settings of that checkpoint.
    """
    url = writing.root_of(spec.checkpoints.folder, context.job, context.run_dir)
    count = 0
    try:
        count = writing.newest_number(Folder.within(context.roots, url).folders())
        newest = _newest_checkpoint(context)
        states = outer_states(newest.folder(context.roots), newest.manifest)
        return (
            {FragmentId(p): state.momentum for p, state in enumerate(states)},
            newest.url,
            count,
            newest.manifest.changed,
        )
    except (AtollError, OSError, ValueError) as error:
        why = in_words(error)
    try:
        if spec.synchroniser.node_groups and spec.checkpoints.folder is None:
            momentum, place, changed = _momentum_on_head(context.run_dir)
            return momentum, place, count, changed
    except (AtollError, Incomplete, OSError, ValueError) as error:
        why = in_words(error)
    log.info("momentum begins at zero: %s", why)
    return {}, ZEROS, count, UNCHANGED


def _momentum_on_head(run_dir: Path) -> tuple[dict[FragmentId, Tensors], str, ChangedSettings]:
    """Return the momentum and settings of the newest checkpoint in the head's run folder, and where that is.

    Raises DataError, Incomplete, InfrastructureError or OSError.
    """
    ask = head_of(run_dir)
    files: dict[str, RunFileFacts] = {} if ask is None else {facts.name: facts for facts in ask(files_of, run_dir)}
    places = [Path(name).parent for name in files if name.endswith(f"/{MANIFEST}")]
    numbered = {writing.number_of(place.name) or 0: place for place in places if place.parent == Path(CHECKPOINTS)}
    newest = numbered[max(numbered)] if any(numbered) else None
    if ask is None or newest is None:
        raise DataError(detail="the head has no checkpoint of this job.")
    name = f"{newest}/{MANIFEST}"
    manifest = decode_manifest(whole_file(ask, run_dir, files[name]), name)
    digests = {file.name: file.digest for file in manifest.files}
    momentum: dict[FragmentId, Tensors] = {}
    for p in range(len(manifest.fragments)):
        name = momentum_name(p)
        facts = files.get(f"{newest}/{name}")
        content = whole_file(ask, run_dir, facts) if facts is not None else b""
        if blake2b(content, digest_size=16).hexdigest() != digests.get(name):
            raise DataError(detail=f"{name} of the newest checkpoint on the head is damaged or missing.")
        momentum[FragmentId(p)] = wire_format.decode(content)
    return momentum, str(run_dir / newest), manifest.changed


def _event(
    result: Survey, choice: Choice, context: JobContext, policy: JobPolicy, momentum: tuple[str, int]
) -> JobSalvaged:
    plans = {plan.island for plan in policy.islands}
    surviving = tuple(one for one in survivors(result.answers, choice) if one.island in plans)
    return JobSalvaged(
        context.now(),
        f"epoch {result.epoch - 1}",
        result.epoch,
        tuple(one.version for one in choice.chosen),
        tuple(one.step for one in choice.chosen),
        tuple(one.digest for one in choice.chosen),
        choice.lost,
        momentum[0],
        tokens_trained(result.answers),
        surviving,
        tuple(sorted(result.last_incarnations.items())),
        max(momentum[1], result.checkpoint_count),
        tuple(f"{island}: {why}" for island, why in sorted(choice.doubted.items())),
    )


def wanted_counts(spec: JobSpec, surviving: Sequence[Life]) -> dict[NodeGroupId, int]:
    """Return how many islands each node group begins with: those of the specification, and all that survived."""
    counts = dict(spec.wanted_counts())
    order: dict[NodeGroupId, list[IslandId]] = {}
    for island, section in spec.island_sections(slots=True).items():
        order.setdefault(NodeGroupId(section.node_group), []).append(IslandId(island))
    alive = {island for island, _ in surviving}
    for group, islands in order.items():
        last = max((n for n, island in enumerate(islands, start=1) if island in alive), default=0)
        if group in counts:
            counts[group] = max(counts[group], last)
    return counts
