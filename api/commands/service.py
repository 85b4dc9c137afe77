"""Commands for the installation: up, down, demo; and head and serve, its parts as programs in the foreground."""

from __future__ import annotations

import ipaddress
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from api.commands.common import (
    HomeOption,
    PackagesOption,
    RetentionBytesOption,
    RetentionDaysOption,
    RetentionFailedDaysOption,
    RunsOption,
    StoreKeyOption,
    console,
    is_on_command_line,
    refuse_without,
    say,
)
from api.commands.nodes import (
    CERTIFICATES_VARIABLE,
    PortsOption,
    WaitOption,
    checked_address,
    checked_certificates,
    checked_ports,
    checked_token,
)
from api.commands.nodes import TOKEN_VARIABLE as CLUSTER_TOKEN_VARIABLE
from api.installation.binding import PORT_FIRST, Binding, refuse_password_in_view
from api.installation.home import DATABASE_VARIABLE, DEFAULT_HOME, DEFAULT_RUNS, Home, missing_roots
from api.installation.up import GROUPS, RAY_CONTROL, Installation, Say, command_of
from api.installation.up import down as take_down
from api.installation.up import end as end_service
from api.installation.up import start as start_service
from api.installation.up import up as bring_up
from orchestrator.errors import AtollError, ConfigurationError, Conflict, NotFound
from orchestrator.system import home_files, object_store, python_process, signals, succession, user_packages
from orchestrator.system.ports import LOOPBACK
from orchestrator.system.python_process import refuse_unset
from orchestrator.system.run_folder import Retention

if TYPE_CHECKING:
    from rich.console import Console

    from api.client import Client
    from api.schemas import Job

HEAD_MODULE, HEAD_PORT = "orchestrator.runtime.head", 6379
DEMO_HOME = DEFAULT_HOME / "demo"
KILL_AT_RATIO = 1 / 3
REPORT_TIMEOUT_S = 60.0
Unit = Literal["head", "service", "join"]
OWNER_ALONE = 0o077
"""The umask: only the owner can read what these commands write into home and runs."""

AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="PACKAGE", help="Allow jobs to name code of this package. Repeatable."),
]
CheckpointsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoints",
        metavar="ROOT",
        help="Allow jobs to read and write checkpoints below this folder or URL (s3://BUCKET/PREFIX). Repeatable. "
        "Default: the working folder, without hidden files. HOME/checkpoints and RUNS are always allowed, the rest of "
        "HOME never.",
        show_default=False,
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="ROOT",
        help="Allow jobs to read text files below this folder. Repeatable. Default: the working folder, without "
        "hidden files. HOME/data is always allowed, the rest of HOME never.",
        show_default=False,
    ),
]
JobsMaxOption = Annotated[
    int | None,
    typer.Option("--jobs-max", min=1, max=10_000, help="Most jobs that run at a time; others are queued. Default: 16."),
]
RestartSilentOption = Annotated[
    float | None,
    typer.Option(
        "--restart-silent-after",
        min=0,
        max=100_000,
        metavar="MINUTES",
        help="Restart the synchroniser of a job that has not answered for this long; 0: never. Default: 5.",
    ),
]
PricesOption = Annotated[
    Path | None,
    typer.Option(
        "--prices",
        metavar="FILE",
        help="What machines of node groups cost, as in deploy/configs/prices.yaml. `atoll cost` then says what jobs cost.",
        show_default=False,
    ),
]
CordonOption = Annotated[
    bool,
    typer.Option(
        "--cordon-bad-nodes",
        help="Cordon nodes that keep failing islands which live elsewhere, a quarter of a group's at most, for 6 hours.",
    ),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar=DATABASE_VARIABLE,
        help="Database, as SQLAlchemy URL.",
        show_default="SQLite in the home",
    ),
]
NewStoreOption = Annotated[
    bool, typer.Option("--new-store", help="Start with an empty database if the home's is lost or damaged.")
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Folder, s3://, gs:// or az:// for the logs of mirrored jobs, and for what another machine needs to take over. "
        "Remembered in the home.",
        show_default=False,
    ),
]
PassOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pass-environment",
        metavar="NAME",
        help="Pass this variable to service and islands, such as a store's credentials. Repeatable.",
    ),
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        "--partition-tolerance",
        min=3,
        max=1e6,
        metavar="SECONDS",
        help="How long islands survive while their region is cut off. Default: 600. Set when the cluster starts.",
    ),
]
HostOption = Annotated[
    str, typer.Option("--host", help="Address to listen on; beyond loopback only with a certificate.")
]
CertificateOption = Annotated[
    Path | None, typer.Option("--certificate", help="Serve HTTPS with this certificate (PEM).")
]
KeyOption = Annotated[Path | None, typer.Option("--key", help="The certificate's key (PEM).")]
CertificatesOption = Annotated[
    Path | None,
    typer.Option(
        "--certificates",
        envvar=CERTIFICATES_VARIABLE,
        help="This machine's folder from `atoll certificates issue`. All connections then use TLS.",
        show_default=False,
    ),
]


def checked_ip(address: str) -> str:
    """Return the address. Raises ConfigurationError, also when only a unit is installed, for text that is not one."""
    try:
        ipaddress.ip_address(address)
    except ValueError as error:
        raise ConfigurationError(
            detail=f"--address {address!r} is not an IP address. Give one of this machine's, as others reach it, such as "
            "10.0.0.7."
        ) from error
    return address


def up(
    context: typer.Context,
    home: HomeOption = DEFAULT_HOME,
    runs: RunsOption = DEFAULT_RUNS,
    groups: Annotated[
        Path, typer.Option("--groups", help="File of node groups.", show_default="deploy/configs/groups.yaml")
    ] = GROUPS,
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, help="Port to listen on. Default: 8470, or the next free one."),
    ] = None,
    control: Annotated[
        str, typer.Option("--control", metavar="MODULE:FACTORY", help="What runs the jobs. Default: Ray.")
    ] = RAY_CONTROL,
    host: HostOption = LOOPBACK,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow --host without a certificate.")] = False,
    allow: AllowOption = None,
    packages: PackagesOption = None,
    checkpoints: CheckpointsOption = None,
    data: DataOption = None,
    jobs_max: JobsMaxOption = None,
    restart_silent_after: RestartSilentOption = None,
    prices: PricesOption = None,
    cordon_bad_nodes: CordonOption = False,
    retention_days: RetentionDaysOption = None,
    retention_failed_days: RetentionFailedDaysOption = None,
    retention_bytes: RetentionBytesOption = None,
    partition_tolerance: ToleranceOption = None,
    database: DatabaseOption = None,
    new_store: NewStoreOption = False,
    store: StoreOption = None,
    store_key: StoreKeyOption = None,
    pass_environment: PassOption = None,
) -> None:
    """Start the service and an embedded cluster if they are not running yet. HOME/token then holds an admin token."""
    os.umask(OWNER_ALONE)
    if is_on_command_line(context, "database"):
        refuse_password_in_view(database)
    refuse_without_store(context, store, home)
    binding = Binding(host, certificate, key, insecure)
    wanted = Installation(
        Home(home),
        runs,
        groups,
        port,
        control,
        binding,
        tuple(allow or ()),
        tuple(packages or ()),
        database,
        tuple(checkpoints or ()),
        tuple(data or ()),
        jobs_max,
        new_store,
        partition_tolerance,
        Retention(retention_days, retention_failed_days, retention_bytes),
        tuple(pass_environment or ()),
        store,
        store_key,
        restart_silent_after,
        prices,
        cordon_bad_nodes,
    )
    wanted.retention.refuse_senseless()
    bring_up(wanted, say)


def down(
    home: HomeOption = DEFAULT_HOME,
    keep_jobs: Annotated[
        bool,
        typer.Option("--keep-jobs", help="Let the next `atoll up` continue the running jobs, as after a restart."),
    ] = False,
) -> None:
    """Stop the service and its embedded cluster, and with it every running job."""
    os.umask(OWNER_ALONE)
    take_down(Home(home), say, keep_jobs=keep_jobs)


def demo(
    home: HomeOption = DEMO_HOME,
    runs: RunsOption = DEFAULT_RUNS,
    file: Annotated[
        Path | None, typer.Option("--spec", help="Another job specification.", show_default="deploy/configs/demo.yaml")
    ] = None,
    groups: Annotated[
        Path, typer.Option("--groups", help="File of node groups.", show_default="deploy/configs/groups.yaml")
    ] = GROUPS,
    island: Annotated[str, typer.Option("--kill", help="The island to kill after a third of the tokens.")] = "asia",
) -> None:
    """Run a demonstration: start, train on four islands, kill one, watch it come back, report, and stop everything."""
    os.umask(OWNER_ALONE)
    raise typer.Exit(run_demo(Installation(Home(home), runs, groups), file, island, console(), say))


def head(
    context: typer.Context,
    address: Annotated[
        str,
        typer.Option(
            "--address", metavar="IP", callback=checked_ip, help="This machine's address, as others reach it."
        ),
    ],
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port that machines join at.")] = HEAD_PORT,
    certificates: CertificatesOption = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Beyond loopback without TLS, where something else encrypts.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    store: StoreOption = None,
    store_key: StoreKeyOption = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take over from the store although the head before still answers.")
    ] = False,
    partition_tolerance: ToleranceOption = None,
    packages: PackagesOption = None,
    pass_environment: PassOption = None,
) -> None:
    """Be the head of a cluster whose nodes are other machines (`atoll join`), until a signal.

    Its secret is HOME/cluster/token. It knows its nodes and jobs again when it starts again, also after SIGKILL or a
    restart of the machine.
    """
    os.umask(OWNER_ALONE)
    refuse_unset(os.environ, pass_environment or ())
    url = store or object_store.remembered(home.resolve())
    refuse_without_store(context, url, home)
    if url is None:
        folder = checked_certificates(certificates, f"{address}:{port}", address, insecure=insecure)
    Home(home).require_room()
    if url is not None:
        fleet = succession.opened(url, home.resolve(), store_key, say)
        if (before := succession.prepare_to_lead(fleet, take_over=take_over)) is not None:
            say(f"taking the place of head {before.number} of {url}, which was {before.address or 'not reachable'}")
        certificates = certificates or (None if insecure else restored_certificates(home))
        folder = checked_certificates(certificates, f"{address}:{port}", address, insecure=insecure)
        home_files.replace(home / object_store.REMEMBERED, f"{url}\n")
    command = ["head", "--home", str(home.resolve()), "--address", address, "--port", str(port)]
    command += common_options(folder, partition_tolerance, packages, pass_environment)
    python_process.become(python_process.command(HEAD_MODULE, *command))


def serve(
    context: typer.Context,
    head: Annotated[
        str | None,
        typer.Option(
            "--head", metavar="HOST:PORT", help="The head. Default: the one of this home.", show_default=False
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            envvar=CLUSTER_TOKEN_VARIABLE,
            help="File with the secret of a head of another home, readable by this user only.",
            show_default=False,
        ),
    ] = None,
    certificates: CertificatesOption = None,
    home: HomeOption = DEFAULT_HOME,
    runs: RunsOption = DEFAULT_RUNS,
    host: HostOption = LOOPBACK,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = PORT_FIRST,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", help="Serve HTTPS with this certificate (PEM). Default: that of --certificates."),
    ] = None,
    key: KeyOption = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Serve HTTP, and join without --certificates, where something else encrypts."),
    ] = False,
    allow: AllowOption = None,
    packages: PackagesOption = None,
    checkpoints: CheckpointsOption = None,
    data: DataOption = None,
    jobs_max: JobsMaxOption = None,
    restart_silent_after: RestartSilentOption = None,
    prices: PricesOption = None,
    cordon_bad_nodes: CordonOption = False,
    retention_days: RetentionDaysOption = None,
    retention_failed_days: RetentionFailedDaysOption = None,
    retention_bytes: RetentionBytesOption = None,
    database: DatabaseOption = None,
    new_store: NewStoreOption = False,
    store: StoreOption = None,
    store_key: StoreKeyOption = None,
    own_address: Annotated[
        str | None,
        typer.Option("--own-address", metavar="IP", help="This machine's address, as the head reaches it."),
    ] = None,
    ports: PortsOption = None,
    partition_tolerance: ToleranceOption = None,
    pass_environment: PassOption = None,
    wait: WaitOption = 10,
) -> None:
    """Be the service of a head (`atoll head`) until a signal, on its machine or another one. Starts no node group."""
    os.umask(OWNER_ALONE)
    if is_on_command_line(context, "database"):
        refuse_password_in_view(database)
    refuse_without_store(context, store, home)
    options = ["serve", "--home", str(home.resolve()), "--wait", str(wait)]
    if head is None and not insecure:
        certificates = certificates or restored_certificates(home)
    folder = certificates
    if head is not None:
        is_in_the_clear = insecure and certificates is None
        folder = checked_certificates(certificates, checked_address(head), own_address, insecure=is_in_the_clear)
        options += ["--head", head, "--token-file", str(checked_token(token_file).absolute())]
        options += ["--own-address", own_address] if own_address else []
        options += ["--ports", checked_ports(ports)] if ports else []
    else:
        refuse_without(context, "--head HOST:PORT", "own_address", "ports", "token_file")
    if folder is not None and not insecure and certificate is None and key is None:
        certificate, key = folder / "tls.crt", folder / "tls.key"
    wanted = Installation(
        Home(home),
        runs,
        binding=Binding(host, certificate, key, insecure),
        port=port,
        packages=tuple(allow or ()),
        package_folders=tuple(packages or ()),
        database=database,
        checkpoints=tuple(checkpoints or ()),
        data=tuple(data or ()),
        jobs_max=jobs_max,
        new_store=new_store,
        retention=Retention(retention_days, retention_failed_days, retention_bytes),
        passed=tuple(pass_environment or ()),
        store=store,
        store_key=store_key,
        restart_silent_after_min=restart_silent_after,
        prices=prices,
        cordon_bad_nodes=cordon_bad_nodes,
    )
    wanted.retention.refuse_senseless()
    for root in missing_roots(wanted.data):
        say(f"warning: --data {root} does not exist on this machine; only jobs on nodes that have it can read there")
    options += common_options(folder, partition_tolerance, packages, pass_environment)
    options += ["--pass-environment", DATABASE_VARIABLE] if database else []
    os.environ |= {DATABASE_VARIABLE: database} if database else {}  # all users can see command lines
    python_process.become(python_process.command(HEAD_MODULE, *options, "--", *command_of(wanted, say)))


def install_units(
    context: typer.Context,
    unit: Annotated[Unit, typer.Argument(help="What this machine is to run.", show_default=False)],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="Those of `atoll head`, `atoll serve` or `atoll join`."),
    ] = None,
    root: Annotated[Path, typer.Option("--root", help="Only write files, below this folder.")] = Path("/"),
    no_start: Annotated[bool, typer.Option("--no-start", help="Do not start the unit.")] = False,
) -> None:
    """Have systemd run the head, the service or a node of this machine, now and at every boot. Run it as root.

    Its options are in /etc/atoll/UNIT.env, its state in /var/lib/atoll. It runs as the user atoll, which gets
    /etc/atoll/token and /etc/atoll/certificates.
    """
    from api.installation.units import UNITS, install

    command = context.find_root().command.commands[UNITS[unit]]  # type: ignore[attr-defined]
    command.make_context(f"atoll {UNITS[unit]}", list(options or ()))  # says what is wrong with the options
    install(unit, options or (), root, say, start=not no_start)


def refuse_without_store(context: typer.Context, url: str | None, home: Path) -> None:
    """Raise ConfigurationError if an option about the store was typed, and neither command line nor home has one."""
    if url is None and object_store.remembered(home.resolve()) is None:
        refuse_without(
            context, "--store URL", "store_key", "take_over", because=f", and the home {home} remembers none"
        )


def restored_certificates(home: Path) -> Path | None:
    """Return the certificates that a head's home got from the store, None if there are none."""
    folder = home.resolve() / succession.STATE / succession.CERTIFICATES
    return folder if folder.is_dir() else None


def common_options(
    certificates: Path | None, tolerance_s: float | None, packages: list[str] | None, passed: list[str] | None
) -> list[str]:
    """Return the options that head and service share, in the form of the programs that do the work."""
    options = ["--certificates", str(certificates.absolute())] if certificates else []
    options += ["--partition-tolerance", str(tolerance_s)] if tolerance_s is not None else []
    for folder in user_packages.resolved(packages or ()):
        options += ["--packages", folder]
    return [*options, *(word for name in passed or () for word in ("--pass-environment", name))]


# ── the demo ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_demo(wanted: Installation, spec: Path | None, island: str, console: Console, say: Say) -> int:
    """Run the demo and return its exit code.

        up ─▶ submit ─▶ live table ─▶ a third of the tokens: kill an island ─▶ … ─▶ the end ─▶ report ─▶ down

    It uses only what users have: the kill is the request that ``atoll kill`` makes. Whatever happens, Ctrl-C included,
    everything that it started is ended.

    1 if the job did not complete or has no report; 128 plus the number of the signal that ended it.
    """
    from api.installation.home import CONFIGS
    from orchestrator.specification.config import read_job_document

    document = read_job_document(spec or CONFIGS / "demo.yaml")
    with signals.as_exceptions(), wanted.home.locked_for_change("demo"):
        return _run_demo(wanted, document, island, console, say)


def _run_demo(wanted: Installation, document: dict[str, Any], island: str, console: Console, say: Say) -> int:
    from api.client import Client
    from api.terminal.watch import lines_that_matter, watch
    from orchestrator.system.run_folder import REPORT_PAGE

    try:
        start_service(wanted, say)
        with Client.at(wanted.home.path) as client:
            job = client.submit(document)
            say(f"submitted {job.job}: {job.island_count} islands, {job.token_budget:,} tokens")
            ended = watch(client, job.job, console, DemoKill(client, island))
            say(f"{ended.job} {ended.state}{f': {ended.reason}' if ended.reason else ''}")
            report = wait_for_report(client, ended)
    except KeyboardInterrupt:
        say("interrupted; stopping what was started")
        return signals.SIGNALLED + signal.SIGINT
    except SystemExit as by_signal:
        say("interrupted; stopping what was started")
        return int(by_signal.code or 0)
    finally:
        with signals.ignored():
            end_service(wanted.home, say)
    for text in lines_that_matter(report):
        console.print(text, highlight=False, soft_wrap=True)
    page = Path(ended.run_dir) / REPORT_PAGE
    console.print(f"report    {page if page.is_file() else page.with_suffix('.json')}", highlight=False, soft_wrap=True)
    return 0 if ended.state == "completed" and page.is_file() else 1


class DemoKill:
    """Kills one island, once, when a third of the tokens are trained and the island is training."""

    def __init__(self, client: Client, island: str) -> None:
        self._client = client
        self._island = island
        self._done = False

    def __call__(self, job: Job) -> str | None:
        if self._done or job.state.final or job.tokens_trained < KILL_AT_RATIO * job.token_budget:
            return None
        if not any(island.island == self._island and island.state == "training" for island in job.islands):
            return None
        self._done = True
        try:
            self._client.kill(job.job, self._island)
        except AtollError as error:
            return f"{self._island} could not be killed: {error}"
        return f"killed {self._island} (SIGKILL, as by `atoll kill {job.job} {self._island}`); the others keep training"


def wait_for_report(client: Client, job: Job) -> dict[str, object]:
    """Return the report of the ended job, waiting for it. Raises the service's error after ``REPORT_TIMEOUT_S``."""
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    while True:
        try:
            return client.report(job.job)
        except (NotFound, Conflict):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Service")(up)
    app.command(rich_help_panel="Service")(head)
    app.command(rich_help_panel="Service")(serve)
    app.command("install-units", rich_help_panel="Service")(install_units)
    app.command(rich_help_panel="Service")(down)
    app.command(rich_help_panel="Service")(demo)
