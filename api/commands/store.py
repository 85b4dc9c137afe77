"""Commands for the store of durable logs: `atoll store check` and `atoll store gc`. They need no service."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from api.commands.common import JsonOption, StoreKeyOption, console, echo, print_json, say
from orchestrator.errors import DataError, InfrastructureError, NotFound
from orchestrator.system import object_store, store_log, succession
from orchestrator.system.mirror import JOBS, JobObjects
from orchestrator.system.object_store import ObjectStore
from orchestrator.system.run_folder import SHARDS

REQUESTS_MAX = 16
_LOG_NAME = re.compile(rf"{JOBS}/([^/]+(?:/{SHARDS}/[0-9]+)?)/")
UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="The store, as for `atoll up --store`.")]
JobOption = Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only this job.", show_default=False)]


def check(
    url: UrlArgument, job: JobOption = None, store_key: StoreKeyOption = None, as_json: JsonOption = False
) -> None:
    """Read all that recoveries would need, and compare it with its digests. Exit code 1 if anything is damaged."""
    with _Reached(url) as (store, readers):
        fleet, conditions = object_store.fleet_in(store), {}
        for name, objects in _logs(store, job, store_key).items():
            if store_log.content_or_none(objects, store_log.DELETED) is not None:
                continue  # the job was deleted, and gc removes what is left
            with _Progress(name) as progress:
                conditions[name] = store_log.examine(objects, readers, progress)
    damaged = [name for name, condition in conditions.items() if condition.problems]
    if as_json:
        print_json({"url": store.url, "fleet": fleet, "jobs": {name: asdict(c) for name, c in conditions.items()}})
    else:
        for name, condition in conditions.items():
            facts = f"{condition.segment:,} segments, {condition.file_count} files with {condition.file_bytes:,} bytes"
            echo(f"{name}: {'damaged' if condition.problems else 'sound'}: {facts}")
            for problem in condition.problems:
                echo(f"  {problem}")
        echo(f"{store.url}: {len(conditions)} logs, {len(damaged)} of them damaged")
    if damaged:
        raise typer.Exit(1)


def gc(
    url: UrlArgument,
    job: JobOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    store_key: StoreKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what no recovery needs: leftovers of synchronisers that died, and of deleted jobs. Jobs may run meanwhile."""
    removed: dict[str, dict[str, int]] = {}
    with _Reached(url) as (store, readers):
        object_store.fleet_in(store)
        for name, objects in _logs(store, job, store_key).items():
            try:
                removed[name] = store_log.superfluous(objects, readers)
            except DataError as error:
                say(f"{name} is left alone, because its log is damaged: {error}")
                continue
            if not dry_run:
                names = list(removed[name])
                with _Progress(name) as progress:
                    for number, _ in enumerate(readers.map(lambda one: objects.delete([one]), names), start=1):  # noqa: B023
                        progress(number, len(names))
    if as_json:
        totals = {name: {"objects": len(sizes), "bytes": sum(sizes.values())} for name, sizes in removed.items()}
        print_json({"url": store.url, "dry_run": dry_run, "jobs": totals})
        return
    for name, sizes in removed.items():
        verb = "would remove" if dry_run else "removed"
        echo(f"{name}: {verb} {len(sizes):,} objects with {sum(sizes.values()):,} bytes")


class _Reached:
    """The store, and threads for requests to it. What it refuses becomes an error with a remedy."""

    def __init__(self, url: str) -> None:
        self._store, self._readers = object_store.open_store(url), ThreadPoolExecutor(REQUESTS_MAX, "store")

    def __enter__(self) -> tuple[ObjectStore, ThreadPoolExecutor]:
        return self._store, self._readers

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._readers.shutdown(wait=error is None, cancel_futures=True)
        if isinstance(error, FileNotFoundError):
            raise NotFound(
                detail=f"{self._store.url} is no store of atoll: it has no {object_store.HEADER}.",
                remedy="Give the URL that the service was started with.",
            ) from error
        if isinstance(error, OSError):
            raise InfrastructureError(
                detail=f"{error.strerror or error}.", remedy=object_store.remedy_of(error)
            ) from error


def _logs(store: ObjectStore, job: str | None, store_key: Path | None) -> dict[str, ObjectStore]:
    """Return the logs of all jobs or of one, of their shards, and with the key that of the service."""
    names = sorted({match[1] for name in store.sizes(JOBS) if (match := _LOG_NAME.match(name)) is not None})
    jobs = sorted({name.partition("/")[0] for name in names})
    if job is not None and job not in jobs:
        raise NotFound(detail=f"{store.url} has no log of job {job!r}.", remedy=f"It has {', '.join(jobs) or 'none'}.")
    wanted = [name for name in names if job in (None, name.partition("/")[0])]
    logs: dict[str, ObjectStore] = {name: JobObjects(store, name) for name in wanted}
    if job is None and store.sizes(succession.SERVICE):
        if store_key is None:
            say("the copy of the service is sealed, and is left alone. Give its key with --store-key")
        else:
            logs["(service)"] = succession.SealedObjects(store, succession.seal_in(store_key, store))
    return logs


class _Progress:
    """A line at the terminal that says how far a job's objects are."""

    def __init__(self, job: str) -> None:
        self._status = console(stderr=True).status(f"{job}: reading")
        self._job = job

    def __enter__(self) -> Callable[[int, int], None]:
        self._status.start()
        return lambda number, count: self._status.update(f"{self._job}: {number:,} of {count:,} objects")

    def __exit__(self, *_: object) -> None:
        self._status.stop()


def register(app: typer.Typer) -> None:
    store = typer.Typer(no_args_is_help=True, help="Check and clean the store of durable logs.")
    store.command("check")(check)
    store.command("gc")(gc)
    app.add_typer(store, name="store", rich_help_panel="Service")
