"""The architecture as tests: imports only go down, pure packages stay pure, files stay readable.

The table is the one of docs/architecture.md. A row names what a package may import besides itself and the standard library;
pure packages may import only the standard-library modules listed in ``PURE_STDLIB``.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("orchestrator", "learners", "api")
LINES_MAX = 600
VAGUE_NAMES = {"told", "found", "asked", "kept", "known", "given", "made", "said", "heard"}
DOCUMENT_KEYS = {"api.chaos.schemas": {"told"}, "orchestrator.accounting.ledger": {"kept"}}
"""Vague names that a REST answer or a job's status has for a key, by the module that writes it."""

PURE_STDLIB = frozenset(
    [
        "__future__",
        "abc",
        "bisect",
        "collections",
        "contextlib",
        "dataclasses",
        "difflib",
        "enum",
        "errno",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "json",
        "math",
        "operator",
        "random",
        "re",
        "struct",
        "types",
        "typing",
        "zlib",
    ]
)
CORE = "orchestrator.core"
FOLDS = "orchestrator.accounting"

MAY_IMPORT: dict[str, frozenset[str]] = {
    "orchestrator.errors": frozenset(),
    "orchestrator.system": frozenset(
        {
            "orchestrator.errors",
            "psutil",
            "fsspec",
            "obstore",
        }
    ),
    "orchestrator.text": frozenset(
        {
            "orchestrator.errors",
            "orchestrator.specification.bounds",
            "orchestrator.system",
            "zstandard",
        }
    ),
    "orchestrator.specification": frozenset(
        {
            CORE,
            "orchestrator.errors",
            "orchestrator.models",
            "orchestrator.parameters.codec.registry",
            "orchestrator.system",
            "orchestrator.text",
            "pydantic",
            "yaml",
        }
    ),
    "orchestrator.specification.bounds": frozenset(
        {
            "pydantic",
        }
    ),
    "orchestrator.core": frozenset(
        {
            "orchestrator.errors",
        }
    ),
    "orchestrator.status": frozenset(
        {
            "orchestrator.specification.bounds",
            "pydantic",
            "typing_extensions",
        }
    ),
    "orchestrator.actors": frozenset(
        {
            CORE,
            "orchestrator.status",
            "orchestrator.channel.endpoint",
            "orchestrator.system",
            "orchestrator.parameters.holding",
            "orchestrator.parameters.parts",
            "orchestrator.parameters.pieces",
            "orchestrator.parameters.tensors",
            "ray",
        }
    ),
    "orchestrator.replica": frozenset(
        {
            CORE,
            "orchestrator.errors",
        }
    ),
    "orchestrator.models": frozenset(
        {
            "orchestrator.specification.bounds",
            "orchestrator.errors",
            "pydantic",
        }
    ),
    "orchestrator.models.huggingface": frozenset(
        {
            "orchestrator.specification",
            "orchestrator.errors",
            "orchestrator.models",
            "orchestrator.parameters.pieces",
            "orchestrator.system",
            "orchestrator.text",
            "ml_dtypes",
            "numpy",
            "pydantic",
        }
    ),
    "orchestrator.simulation.advice": frozenset(
        {
            "orchestrator.specification.bounds",
            "orchestrator.specification.config",
            "orchestrator.errors",
            "orchestrator.specification.memory_budget",
            "orchestrator.simulation.line_advice",
        }
    ),
    "orchestrator.parameters": frozenset(
        {
            CORE,
            "orchestrator.system",
            "orchestrator.errors",
            "numpy",
            "ml_dtypes",
            "blake3",
            "crc32c",
        }
    ),
    "orchestrator.certificates": frozenset(
        {
            "orchestrator.system",
            "orchestrator.errors",
            "cryptography",
        }
    ),
    "orchestrator.channel": frozenset(
        {
            "orchestrator.certificates.authority",
            "orchestrator.errors",
            "numpy",
            "cryptography",
            "crc32c",
        }
    ),
    "orchestrator.checkpoints": frozenset(
        {
            CORE,
            "orchestrator.parameters",
            "orchestrator.system",
            "orchestrator.errors",
            "numpy",
            "blake3",
            "fsspec",
        }
    ),
    "orchestrator.accounting": frozenset(
        {
            CORE,
            "orchestrator.errors",
        }
    ),
    "orchestrator.elastic": frozenset(
        {
            CORE,
        }
    ),
    "orchestrator.kubernetes": frozenset(
        {
            "orchestrator.specification.bounds",
            "orchestrator.specification.config",
            "orchestrator.errors",
            "orchestrator.runtime.settings",
            "orchestrator.specification.validation",
            "orchestrator.system.roots",
            "orchestrator.system.user_packages",
            "pydantic",
        }
    ),
    "orchestrator.tape": frozenset(
        {
            CORE,
            FOLDS,
            "orchestrator.system",
            "orchestrator.elastic",
            "orchestrator.errors",
            "pydantic",
            "zstandard",
        }
    ),
    "orchestrator.simulation": frozenset(
        {
            CORE,
            FOLDS,
            "orchestrator.elastic",
            "orchestrator.parameters.codec.registry",
            "orchestrator.replica",
            "orchestrator.tape",
            "orchestrator.errors",
            "orchestrator.system",
            "orchestrator.specification",
            "pydantic",
            "pydantic_core",
        }
    ),
    "tests.swarm": frozenset(
        {
            CORE,
            FOLDS,
            "orchestrator.simulation",
            "orchestrator.specification.config",
            "orchestrator.parameters",
            "orchestrator.replica",
            "orchestrator.checkpoints",
            "orchestrator.host",
            "orchestrator.system",
            "orchestrator.tape",
            "orchestrator.errors",
            "numpy",
        }
    ),
    "orchestrator.chaos": frozenset(
        {
            CORE,
            FOLDS,
            "orchestrator.simulation.impairment",
            "orchestrator.simulation",
            "orchestrator.errors",
            "orchestrator.system",
            "orchestrator.specification.bounds",
            "orchestrator.specification.sections",
            "orchestrator.specification.validation",
            "pydantic",
            "pydantic_core",
        }
    ),
    "orchestrator.report": frozenset(
        {
            FOLDS,
            CORE,
            "orchestrator.errors",
        }
    ),
    "orchestrator.host": frozenset(
        {
            CORE,
            FOLDS,
            "orchestrator.checkpoints",
            "orchestrator.specification.config",
            "orchestrator.status",
            "orchestrator.system",
            "orchestrator.errors",
            "orchestrator.parameters",
            "orchestrator.tape",
            "numpy",
            "safetensors",
        }
    ),
    "orchestrator.runtime": frozenset(
        {
            "orchestrator",
            "ray",
            "numpy",
            "psutil",
            "safetensors",
            "yaml",
            "pydantic",
        }
    ),
    "orchestrator.laboratory": frozenset(
        {
            "orchestrator",
            "learners",
            "numpy",
            "yaml",
            "rich",
            "pydantic",
        }
    ),
    "learners": frozenset(
        {
            "orchestrator.system",
            "orchestrator.core.vocabulary",
            "orchestrator.core.messages",
            "orchestrator.replica",
            "orchestrator.parameters.wire_format",
            "orchestrator.parameters.fragment_map",
            "orchestrator.parameters.holding",
            "orchestrator.parameters.parts",
            "orchestrator.parameters.pieces",
            "orchestrator.parameters.tensors",
            "orchestrator.parameters.codec",
            "orchestrator.channel.endpoint",
            "orchestrator.channel.frames",
            "orchestrator.checkpoints",
            "orchestrator.specification.device_mesh",
            "orchestrator.models",
            "orchestrator.specification.sections",
            "orchestrator.specification.training_sections",
            "orchestrator.text",
            "orchestrator.specification.bounds",
            "orchestrator.errors",
            "array_record",
            "jax",
            "numpy",
            "optax",
            "orbax",
            "safetensors",
            "tensorstore",
            "grain",
            "pyarrow",
            "tokenizers",
            "zstandard",
            "ml_dtypes",
            "flax",
            "equinox",
        }
    ),
    "learners.island_spec": frozenset(
        {
            "learners.resharding",
            "orchestrator.errors",
            "orchestrator.specification",
            "orchestrator.system",
            "pydantic",
        }
    ),
    "learners.island": frozenset(
        {
            "learners",
            CORE,
            "orchestrator.actors",
            "orchestrator.channel",
            "orchestrator.system",
            "orchestrator.parameters",
            "orchestrator.replica",
            "orchestrator.checkpoints",
            "orchestrator.errors",
            "ray",
            "numpy",
        }
    ),
    "learners.group": frozenset(
        {
            "learners",
            CORE,
            "orchestrator.actors",
            "orchestrator.channel.endpoint",
            "orchestrator.checkpoints",
            "orchestrator.errors",
            "orchestrator.system",
            "orchestrator.replica",
            "jax",
        }
    ),
    "learners.carried_parts": frozenset(
        {
            "learners",
            CORE,
            "orchestrator.actors",
            "orchestrator.channel",
            "orchestrator.checkpoints",
            "orchestrator.errors",
            "orchestrator.system",
        }
    ),
    "learners.peers": frozenset(
        {
            "learners",
            CORE,
            "orchestrator.actors",
            "orchestrator.channel.frames",
            "orchestrator.errors",
            "orchestrator.parameters.parts",
            "numpy",
            "ray",
        }
    ),
    "learners.evaluator": frozenset(
        {
            "learners",
            CORE,
            "orchestrator.actors",
            "orchestrator.channel.endpoint",
            "orchestrator.parameters",
            "orchestrator.errors",
            "orchestrator.system",
            "ray",
            "numpy",
        }
    ),
    "api": frozenset(
        {
            "orchestrator.system",
            "orchestrator.status",
            "orchestrator.core.commands",
            "orchestrator.core.faults",
            "orchestrator.core.vocabulary",
            "orchestrator.accounting.explanation",
            "orchestrator.chaos",
            "orchestrator.specification",
            "orchestrator.text",
            "orchestrator.certificates",
            "orchestrator.checkpoints",
            "orchestrator.models",
            "orchestrator.errors",
            "orchestrator.parameters.codec.registry",
            "orchestrator.report",
            "orchestrator.simulation",
            "orchestrator.tape",
            "fastapi",
            "starlette",
            "uvicorn",
            "pydantic",
            "sqlalchemy",
            "alembic",
            "httpx",
            "typer",
            "click",
            "rich",
            "yaml",
            "psutil",
            "prometheus_client",
        }
    ),
    "api.storage": frozenset(
        {
            "api.auth.store",
            "api.chaos.store",
            "orchestrator.errors",
            "sqlalchemy",
            "alembic",
            "psycopg",
        }
    ),
    "api.run": frozenset(
        {
            "api.schemas",
            "orchestrator.accounting.explanation",
            "orchestrator.core.vocabulary",
            "orchestrator.report.words",
            "orchestrator.tape",
            "orchestrator.status",
            "orchestrator.errors",
            "orchestrator.system",
            "pydantic",
            "yaml",
        }
    ),
    "api.jobs": frozenset(
        {
            "api.auth",
            "api.checkpoints",
            "api.clocks",
            "api.run",
            "api.schemas",
            "api.storage",
            "orchestrator.simulation.advice",
            "orchestrator.status",
            "orchestrator.specification",
            "orchestrator.core.commands",
            "orchestrator.core.vocabulary",
            "orchestrator.core.faults",
            "orchestrator.models",
            "orchestrator.errors",
            "orchestrator.system",
            "orchestrator.text",
            "orchestrator.tape.codec",
            "pydantic",
        }
    ),
    "api.terminal": frozenset(
        {
            "api.client",
            "api.schemas",
            "orchestrator.errors",
            "orchestrator.report.words",
            "orchestrator.system",
            "pydantic",
            "rich",
        }
    ),
    "api.commands": frozenset(
        {
            "orchestrator.system",
            "api.auth.roles",
            "api.chaos.plans",
            "api.chaos.schemas",
            "api.checkpoints.archive",
            "api.client",
            "api.installation",
            "api.schemas",
            "api.simulation",
            "api.terminal",
            "orchestrator.simulation.advice",
            "orchestrator.specification",
            "orchestrator.certificates",
            "orchestrator.chaos",
            "orchestrator.errors",
            "orchestrator.kubernetes",
            "orchestrator.models",
            "orchestrator.parameters.codec.registry",
            "orchestrator.report",
            "orchestrator.simulation",
            "orchestrator.tape",
            "pydantic",
            "typer",
            "rich",
        }
    ),
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


def imports(path: Path) -> Iterator[str]:
    """Dotted names this file imports, ``from a import b`` as ``a.b`` when that is a module of ours."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = path.relative_to(ROOT).parts
            assert node.level == 0 or home[0] == "tests", f"{path}: relative imports hide which way they go"
            above = home[: -node.level] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            for alias in node.names:
                inner = ROOT.joinpath(*base.split("."), alias.name)
                ours = inner.with_suffix(".py").exists() or inner.is_dir()
                yield f"{base}.{alias.name}" if ours and base else base


def covers(allowed: str, name: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


def row_for(module: str) -> str:
    """The longest row that the module falls under."""
    return max((row for row in MAY_IMPORT if covers(row, module)), key=len, default="")


MODULES = modules((*PACKAGES, "tests/swarm"))
"""The swarm is no product, but its seeds repeat only while it is as pure as what it proves."""


@pytest.mark.parametrize(("module", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_imports_only_go_down(module: str, path: Path) -> None:
    row = row_for(module)
    if module in PACKAGES and not row:
        row = module
    for name in imports(path):
        if name.split(".")[0] in sys.stdlib_module_names:
            pure = any(covers(p, module) for p in PURE) and module not in EXEMPT_FROM_PURITY
            assert not pure or name.split(".")[0] in PURE_STDLIB, f"{module} is pure and may not import {name}"
            continue
        allowed = MAY_IMPORT.get(row, frozenset())
        own = row if row not in ("learners.island", "learners.evaluator") else "learners"
        assert covers(own, name) or any(covers(a, name) for a in allowed), f"{module} may not import {name}"


def test_every_row_of_the_table_is_in_the_document() -> None:
    _, where = (ROOT / "docs" / "architecture.md").read_text().split("## Where things are")
    named = {name.replace("/", ".").removeprefix("orchestrator.") for name in re.findall(r"`([\w/.]+)`", where)}
    rows = {row.removeprefix("orchestrator.") for row in MAY_IMPORT}
    assert sorted(row for row in rows if row not in named and row.removeprefix("learners.") not in named) == []


def test_no_import_goes_round_in_a_circle() -> None:
    """Nor does one that only type checkers see: two modules that know each other are one, or lack a third between them."""
    paths = dict(modules((*PACKAGES, "dashboards", "deploy", "tests")))
    graph = {
        module: {name for name in imports(path) if name in paths and name != module and not covers(name, module)}
        for module, path in paths.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize(("module", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_every_module_is_short_and_says_what_it_is_for(module: str, path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LINES_MAX, f"{module} has outgrown its room; look for the second noun in it"
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{module} does not say what it is responsible for"


@pytest.mark.parametrize(("module", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_names_say_what_a_value_is(module: str, path: Path) -> None:
    """``told``, ``found`` and their like say that something happened to a value. Keys of documents stay as they were."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name)} | {n.arg for n in nodes if isinstance(n, ast.arg)}
    assert names & VAGUE_NAMES <= DOCUMENT_KEYS.get(module, set())


def test_the_core_imports_with_nothing_installed() -> None:
    code = "import orchestrator.core.synchroniser, orchestrator.core.invariants, orchestrator.core.messages"
    subprocess.run(
        [sys.executable, "-S", "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"], check=True
    )


def test_the_synthetic_island_needs_no_jax() -> None:
    code = "import learners.synthetic, learners.loop, sys; assert not {'jax', 'ray'} & set(sys.modules)"
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
