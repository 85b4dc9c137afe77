"""The architecture as tests: imports only go down, pure packages stay pure, files stay readable.

The table is the one of docs/architecture.md. A row names what a package may import besides itself and the standard library;
pure packages may import only the standard-library modules listed in ``PURE_STDLIB``.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("orchestrator", "learners", "api")
LINES_MAX = 600
VAGUE_NAMES = {"told", "found", "asked", "kept", "known", "given", "made", "said", "heard"}
DOCUMENT_KEYS = {"api.chaos.schemas": {"told"}, "orchestrator.accounting.ledger": {"kept"}}
"""Vague names that a REST answer or a job's status has for a key, by the module that writes it."""

_PURE_STDLIB = """
__future__ abc bisect collections contextlib dataclasses difflib enum errno functools hashlib heapq
itertools json math operator random re struct types typing zlib
"""
PURE_STDLIB = frozenset(_PURE_STDLIB.split())
CORE = "orchestrator.core"
FOLDS = "orchestrator.accounting"

MAY_IMPORT = {
    row: frozenset(names.split())
    for row, names in {
        "orchestrator.errors": "",
        "orchestrator.system": "aiohttp cryptography fsspec obstore orchestrator.errors psutil",
        "orchestrator.text": """
            jinja2 numpy orchestrator.errors orchestrator.specification.bounds orchestrator.system pyarrow zstandard
        """,
        "orchestrator.specification": """
            fsspec httpx orchestrator.core orchestrator.errors orchestrator.models
            orchestrator.parameters.codec.registry orchestrator.system orchestrator.text pydantic yaml
        """,
        "orchestrator.specification.bounds": "pydantic",
        "orchestrator.core": "orchestrator.errors",
        "orchestrator.status": "orchestrator.specification.bounds pydantic typing_extensions",
        "orchestrator.actors": """
            orchestrator.channel.endpoint orchestrator.core orchestrator.parameters.holding
            orchestrator.parameters.parts orchestrator.parameters.pieces orchestrator.parameters.tensors
            orchestrator.status orchestrator.system ray
        """,
        "orchestrator.replica": "orchestrator.core orchestrator.errors",
        "orchestrator.models": "orchestrator.errors orchestrator.specification.bounds pydantic",
        "orchestrator.models.huggingface": """
            ml_dtypes numpy orchestrator.errors orchestrator.models orchestrator.parameters.pieces
            orchestrator.specification orchestrator.system orchestrator.text pydantic
        """,
        "orchestrator.simulation.advice": """
            orchestrator.errors orchestrator.simulation.line_advice orchestrator.specification.bounds
            orchestrator.specification.config orchestrator.specification.memory_budget
        """,
        "orchestrator.parameters": """
            blake3 crc32c ml_dtypes numpy orchestrator.core orchestrator.errors orchestrator.system
        """,
        "orchestrator.certificates": "cryptography orchestrator.errors orchestrator.system",
        "orchestrator.channel": "crc32c numpy orchestrator.certificates orchestrator.errors",
        "orchestrator.checkpoints": """
            blake3 fsspec numpy orchestrator.core orchestrator.errors orchestrator.parameters
            orchestrator.system
        """,
        "orchestrator.accounting": "orchestrator.core orchestrator.errors orchestrator.system.plain",
        "orchestrator.elastic": "orchestrator.core",
        "orchestrator.kubernetes": """
            orchestrator.errors orchestrator.runtime.settings orchestrator.specification.bounds
            orchestrator.specification.config orchestrator.specification.documents
            orchestrator.specification.validation orchestrator.system.roots orchestrator.system.user_packages pydantic
        """,
        "orchestrator.tape": """
            orchestrator.accounting orchestrator.core orchestrator.elastic orchestrator.errors
            orchestrator.system pydantic zstandard
        """,
        "orchestrator.simulation": """
            orchestrator.accounting orchestrator.core orchestrator.elastic orchestrator.errors
            orchestrator.parameters.codec.registry orchestrator.replica orchestrator.specification
            orchestrator.system orchestrator.tape pydantic pydantic_core
        """,
        "tests.swarm": """
            numpy orchestrator.accounting orchestrator.checkpoints orchestrator.core orchestrator.errors
            orchestrator.host orchestrator.parameters orchestrator.replica orchestrator.simulation
            orchestrator.specification.config orchestrator.system orchestrator.tape
        """,
        "orchestrator.chaos": """
            orchestrator.accounting orchestrator.core orchestrator.errors orchestrator.simulation
            orchestrator.specification.bounds
            orchestrator.specification.sections orchestrator.specification.validation orchestrator.system
            pydantic pydantic_core
        """,
        "orchestrator.report": """
            orchestrator.accounting orchestrator.core orchestrator.errors orchestrator.system.plain
        """,
        "orchestrator.host": """
            numpy orchestrator.accounting orchestrator.checkpoints orchestrator.core orchestrator.errors
            orchestrator.parameters orchestrator.specification.config orchestrator.status orchestrator.system
            orchestrator.tape safetensors
        """,
        "orchestrator.runtime": "numpy orchestrator psutil pydantic ray safetensors yaml",
        "orchestrator.laboratory": "learners numpy orchestrator pydantic rich yaml",
        "learners": """
            array_record bitsandbytes equinox flax grain jax ml_dtypes numpy optax orbax
            orchestrator.channel.endpoint orchestrator.channel.frames orchestrator.checkpoints
            orchestrator.core.commands orchestrator.core.messages orchestrator.core.vocabulary orchestrator.errors
            orchestrator.models orchestrator.parameters.codec orchestrator.parameters.fragment_map
            orchestrator.parameters.holding orchestrator.parameters.parts orchestrator.parameters.pieces
            orchestrator.parameters.tensors orchestrator.parameters.wire_format orchestrator.replica
            orchestrator.specification.bounds orchestrator.specification.data_sources
            orchestrator.specification.device_mesh orchestrator.specification.sections
            orchestrator.specification.training_sections orchestrator.system orchestrator.text peft pyarrow
            safetensors tensorstore tokenizers torch transformers zstandard
        """,
        "learners.island_spec": """
            orchestrator.errors orchestrator.specification orchestrator.system pydantic
        """,
        "learners.island": """
            learners numpy orchestrator.actors orchestrator.channel orchestrator.checkpoints orchestrator.core
            orchestrator.errors orchestrator.parameters orchestrator.replica orchestrator.system ray
        """,
        "learners.group": """
            jax learners orchestrator.actors orchestrator.channel.endpoint orchestrator.checkpoints
            orchestrator.core orchestrator.errors orchestrator.replica orchestrator.system
        """,
        "learners.profiling": "jax learners orchestrator.actors orchestrator.core orchestrator.errors torch",
        "learners.carried_parts": """
            learners orchestrator.actors orchestrator.channel orchestrator.checkpoints orchestrator.core
            orchestrator.errors orchestrator.system
        """,
        "learners.peers": """
            learners numpy orchestrator.actors orchestrator.channel.frames orchestrator.core
            orchestrator.errors orchestrator.parameters.parts ray
        """,
        "learners.evaluator": """
            learners numpy orchestrator.actors orchestrator.channel.endpoint orchestrator.core
            orchestrator.errors orchestrator.parameters orchestrator.system ray
        """,
        "api": """
            alembic click fastapi httpx orchestrator.accounting.diagnosis orchestrator.accounting.explanation
            orchestrator.certificates
            orchestrator.chaos orchestrator.checkpoints orchestrator.core.commands orchestrator.core.faults
            orchestrator.core.vocabulary orchestrator.errors orchestrator.host.records orchestrator.models
            orchestrator.parameters orchestrator.report orchestrator.runtime.groups
            orchestrator.simulation orchestrator.specification orchestrator.status orchestrator.system orchestrator.tape
            orchestrator.text prometheus_client psutil pydantic rich sqlalchemy starlette typer uvicorn yaml
        """,
        "api.notebook": """
            IPython api.client api.schemas orchestrator.errors orchestrator.report.simulated orchestrator.system.plain
        """,
        "api.tracking": "api.run.tables orchestrator.errors pydantic",
        "api.trackers": "api.tracking crc32c httpx mlflow opentelemetry orchestrator.errors tensorboardX wandb",
        "api.storage": "alembic api.auth.tokens api.chaos.store orchestrator.errors psycopg sqlalchemy",
        "api.run": """
            api.schemas orchestrator.accounting.causes orchestrator.accounting.diagnosis
            orchestrator.accounting.explanation orchestrator.accounting.failures orchestrator.checkpoints
            orchestrator.core.vocabulary orchestrator.errors orchestrator.host.records orchestrator.models
            orchestrator.parameters orchestrator.specification orchestrator.status orchestrator.system orchestrator.tape
            pyarrow pydantic yaml
        """,
        "api.jobs": """
            api.auth api.clocks api.run api.schemas api.storage orchestrator.accounting.failures orchestrator.checkpoints
            orchestrator.core.commands
            orchestrator.core.faults orchestrator.core.vocabulary orchestrator.errors orchestrator.host.records
            orchestrator.models orchestrator.simulation.advice orchestrator.simulation.autopilot
            orchestrator.specification orchestrator.status
            orchestrator.system orchestrator.tape.codec orchestrator.tape.schema orchestrator.text pydantic
        """,
        "api.terminal": """
            api.client api.schemas orchestrator.errors orchestrator.system pydantic
            rich
        """,
        "api.commands": """
            api.auth.permissions api.chaos.plans api.chaos.schemas api.run.archive api.run.following api.client
            api.installation api.run.tables api.schemas api.simulation api.terminal orchestrator.certificates
            orchestrator.chaos orchestrator.errors orchestrator.kubernetes orchestrator.models
            api.tracker_feed orchestrator.parameters.codec.registry orchestrator.report orchestrator.simulation
            orchestrator.simulation.advice orchestrator.specification orchestrator.system orchestrator.tape
            pydantic rich typer
        """,
    }.items()
}
PURE = (
    "orchestrator.core",
    "orchestrator.replica",
    "orchestrator.specification.device_mesh",
    "orchestrator.errors",
    "orchestrator.system.plain",
    "orchestrator.accounting",
    "orchestrator.elastic",
    "orchestrator.tape",
    "orchestrator.simulation",
    "orchestrator.chaos",
    "tests.swarm",
)
EXEMPT_FROM_PURITY = frozenset(
    {
        "orchestrator.tape.storage",
        "tests.swarm.disk",
        "tests.swarm.__main__",
        "tests.swarm.mortal_world",
        "tests.swarm.mortality",
        "tests.swarm.checkpointing_world",
        "tests.swarm.mirrored_world",
    }
)
"""The one place of a pure package that writes files, the swarm's simulated disk and what names its files, and a command."""


def modules(packages: tuple[str, ...] = PACKAGES) -> list[tuple[str, Path]]:
    found = []
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.append((name, path))
    return found


@dataclass(frozen=True)
class Source:
    """What the tests look at in one file, which is parsed once for all of them."""

    line_count: int
    documented: bool
    """A file without text needs no docstring."""
    imports: tuple[str, ...]
    """Dotted names this file imports, ``from a import b`` as ``a.b`` when that is a module of ours."""
    names: frozenset[str]


@cache
def source(path: Path) -> Source:
    text = path.read_text()
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)} | {n.arg for n in nodes if isinstance(n, ast.arg)}
    documented = not text.strip() or bool(ast.get_docstring(tree))
    return Source(len(text.splitlines()), documented, tuple(imports(path, nodes)), frozenset(names))


def imports(path: Path, nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = path.relative_to(ROOT).parts
            assert node.level == 0 or home[0] == "tests", f"{path}: relative imports hide which way they go"
            above = home[: -node.level] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            for alias in node.names:
                yield f"{base}.{alias.name}" if base and is_ours(f"{base}.{alias.name}") else base


@cache
def is_ours(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or place.is_dir()


def covers(allowed: str, name: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


def row_for(module: str) -> str:
    """The longest row that the module falls under."""
    return max((row for row in MAY_IMPORT if covers(row, module)), key=len, default="")


MODULES = modules((*PACKAGES, "tests/swarm"))
"""The swarm is no product, but its seeds repeat only while it is as pure as what it proves."""


def test_imports_only_go_down() -> None:
    assert [fault for module, path in MODULES for fault in wrong_imports(module, path)] == []


def wrong_imports(module: str, path: Path) -> Iterator[str]:
    row = row_for(module)
    if module in PACKAGES and not row:
        row = module
    pure = any(covers(p, module) for p in PURE) and module not in EXEMPT_FROM_PURITY
    allowed = MAY_IMPORT.get(row, frozenset())
    own = row if row not in ("learners.island", "learners.evaluator") else "learners"
    for name in source(path).imports:
        if name.split(".")[0] in sys.stdlib_module_names:
            if pure and name.split(".")[0] not in PURE_STDLIB:
                yield f"{module} is pure and may not import {name}"
        elif not covers(own, name) and not any(covers(a, name) for a in allowed):
            yield f"{module} may not import {name}"


def test_every_row_of_the_table_is_in_the_document() -> None:
    _, where = (ROOT / "docs" / "architecture.md").read_text().split("## Where things are")
    named = {name.replace("/", ".").removeprefix("orchestrator.") for name in re.findall(r"`([\w/.]+)`", where)}
    rows = {row.removeprefix("orchestrator.") for row in MAY_IMPORT}
    assert sorted(row for row in rows if row not in named and row.removeprefix("learners.") not in named) == []


def test_no_import_goes_round_in_a_circle() -> None:
    """Nor does one that only type checkers see: two modules that know each other are one, or lack a third between them."""
    paths = dict(modules((*PACKAGES, "dashboards", "deploy", "tests")))
    graph = {
        module: {name for name in source(path).imports if name in paths and name != module and not covers(name, module)}
        for module, path in paths.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_every_module_is_short_and_says_what_it_is_for() -> None:
    long = [module for module, path in MODULES if source(path).line_count > LINES_MAX]
    assert long == [], "these have outgrown their room; look for the second noun in each"
    silent = [module for module, path in MODULES if not source(path).documented]
    assert silent == [], "these do not say what they are responsible for"


def test_names_say_what_a_value_is() -> None:
    """``told``, ``found`` and their like say that something happened to a value. Keys of documents stay as they were."""
    vague = {module: source(path).names & VAGUE_NAMES - DOCUMENT_KEYS.get(module, set()) for module, path in MODULES}
    assert {module: names for module, names in vague.items() if names} == {}


def test_the_core_imports_with_nothing_installed() -> None:
    code = "import orchestrator.core.synchroniser, orchestrator.core.invariants, orchestrator.core.messages"
    subprocess.run(
        [sys.executable, "-S", "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"], check=True
    )


def test_the_synthetic_island_needs_no_jax() -> None:
    code = "import learners.synthetic, learners.loop, sys; assert not {'jax', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def imported_by(module: str) -> set[str]:
    code = f"import {module}, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    return set(json.loads(done.stdout))


def test_an_island_imports_what_reads_its_specification_only_once_it_has_one() -> None:
    assert {"jax", "pydantic", "cryptography", "orchestrator.specification"} & imported_by("learners.island") == set()


def test_a_synchroniser_imports_what_encrypts_only_if_its_channel_is_encrypted() -> None:
    assert "cryptography" not in imported_by("orchestrator.runtime.synchroniser_actor")


def test_importing_the_specification_builds_no_validator() -> None:
    code = """if True:
        import orchestrator.specification.config
        from orchestrator.specification.bounds import Section
        from orchestrator.status import Facts
        kinds = [*Section.__subclasses__(), *Facts.__subclasses__()]
        built = [one.__name__ for one in kinds if one.__pydantic_complete__]
        assert len(kinds) > 30 and not built, built
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_what_make_bench_runs_can_be_imported() -> None:
    """Nothing else does so, and these names move."""
    subprocess.run([sys.executable, "-c", "import tests.bench.__main__"], check=True, cwd=ROOT)


def test_top_level_folders_are_the_architecture() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {name.split("/")[0] for name in tracked if "/" in name}
    assert folders <= {"orchestrator", "learners", "api", "deploy", "dashboards", "docs", "tests", ".ci"}


LOCKS = sorted(ROOT.glob("requirements*.lock"))


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_file_names_no_host_and_hashes_every_package(path: Path) -> None:
    lock = path.read_text()
    assert "://" not in lock
    assert "--index" not in lock
    packages = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)[1:]
    assert len(packages) > 3
    assert [package.partition(" ")[0] for package in packages if "--hash=sha256:" not in package] == []


def test_no_module_has_a_name_that_git_ignores() -> None:
    command = ["git", "check-ignore", "--no-index", *(str(path) for _, path in MODULES)]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert ignored == [], "it would be missing from commits and wheels"
