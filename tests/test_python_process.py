"""One module says how a Python begins: nothing else in the product names an interpreter, or lets a child inherit all."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.system import python_process
from tests.api.installation import interruptible

ROOT = Path(__file__).parent.parent
OWNER = "orchestrator/system/python_process.py"
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("api", "orchestrator", "learners", "dashboards", "deploy")
    for path in (ROOT / folder).rglob("*.py")
)
PYTHON = re.compile(r"(.*/)?python[0-9.]*")
STARTS = {
    "subprocess": ("Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"),
    "os": ("system", "popen", "exec", "spawn", "posix_spawn"),
    "asyncio": ("create_subprocess",),
    "multiprocessing": ("Process", "Pool", "get_context"),
}
INHERITS_FLAGS = {"learners/streaming/counting.py": {"get_context"}}
"""Pools of multiprocessing, whose processes begin with the flags and variables of the one that starts them."""


def program_starts(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Each call that starts a program, or a process, by its function's name."""
    modules = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            module, name = node.func.value.id, node.func.attr
        elif isinstance(node.func, ast.Name):
            module, name = modules.get(node.func.id, ""), node.func.id
        else:
            continue
        if name.startswith(STARTS.get(module, ()) or "\0"):
            yield name, node


def interpreters(tree: ast.AST) -> Iterator[ast.expr]:
    """What names an interpreter: ``sys.executable``, ``-m``, and commands that begin with ``python``."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="executable" | "_base_executable") | ast.Constant(value="-m" | "-c"):
                yield node
            case ast.List(elts=[ast.Constant(str(first)), *rest]) | ast.Tuple(elts=[ast.Constant(str(first)), *rest]):
                if PYTHON.fullmatch(first) and not (
                    rest and isinstance(rest[0], ast.Constant) and rest[0].value == "-I"
                ):
                    yield node


def faults(file: str) -> Iterator[str]:
    tree = ast.parse((ROOT / file).read_text())
    if file != OWNER:
        for node in interpreters(tree):
            if not in_container(tree, node):
                yield f"{file}:{node.lineno}: let {OWNER} make this command line"
    for name, call in program_starts(tree):
        if name in INHERITS_FLAGS.get(file, ()) or (file == OWNER and name == "execve"):
            continue
        if name.startswith(("exec", "spawn", "system", "popen")):
            yield f"{file}:{call.lineno}: os.{name} goes round {OWNER}"
        elif not any(each.arg == "env" for each in call.keywords):
            yield f"{file}:{call.lineno}: a child must not inherit PYTHONPATH: give it env="


def test_every_start_of_python_goes_through_the_one_module() -> None:
    assert [fault for file in FILES for fault in faults(file)] == []


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run([sys.executable, '-m', 'x'], env={})",
        "subprocess.Popen(['python3', 'x'], env={})",
        "subprocess.run(python_process.module('x'))",
        "os.execv(python, arguments)",
        "os.system('x')",
        "run(command)",
    ],
)
def test_a_start_that_goes_round_it_is_seen(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "case.py").write_text(f"from subprocess import run\n{line}\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert list(faults("case.py"))


def in_container(tree: ast.AST, node: ast.expr) -> bool:
    """Whether this is an option of an isolated Python in a container's command: ``("python", "-I", "-c", …)``."""
    for parent in ast.walk(tree):
        if isinstance(parent, ast.List | ast.Tuple) and node in parent.elts:
            return [each.value for each in parent.elts[:2] if isinstance(each, ast.Constant)] == ["python", "-I"]
    return False


@pytest.mark.parametrize("file", ["deploy/ray", "deploy/atoll", "deploy/Dockerfile", "deploy/compose.yaml"])
def test_scripts_and_the_image_start_python_isolated(file: str) -> None:
    start = r"^(?:exec |ENTRYPOINT |.* CMD | *test: \[CMD, )\S*python\S*(.*)"
    started = re.findall(start, (ROOT / file).read_text(), re.M)
    assert started
    assert [each for each in started if not re.match(r'[, ]*"?-I\b', each)] == []


def test_a_process_takes_no_module_from_its_folder_nor_from_variables(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('shadowed')")
    nested = "import subprocess, sys; import queue; sys.exit(subprocess.call([sys.executable, '-c', 'import queue']))"
    hostile = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": str(tmp_path / "queue.py")}
    plain = subprocess.run([sys.executable, "-c", "import queue"], cwd=tmp_path, env=hostile, capture_output=True)
    assert plain.returncode, "nothing is shadowed without it"
    command, environment = python_process.code(nested), python_process.cleaned(hostile)
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == 0


@pytest.mark.parametrize(("error", "code"), [("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT), ("1 / 0", 1)])
def test_ctrl_c_while_a_command_imports_is_silent_and_an_error_is_not(tmp_path: Path, error: str, code: int) -> None:
    (tmp_path / "slow.py").write_text(f"import os, signal, sys\n{error}\nsys.exit(3)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        python_process.command("slow"), env=environment, capture_output=True, text=True, preexec_fn=interruptible
    )
    assert ended.returncode == code
    assert ("Traceback" in ended.stderr) == (code > 0)


def test_a_command_has_its_arguments_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text("import sys\nprint(__name__, *sys.argv[1:])\nsys.exit(3)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(python_process.command("shows", "a", "b c"), env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (3, "__main__ a b c\n")


@pytest.mark.parametrize(
    ("imported", "code"),
    [("typer", -signal.SIGINT), ("orchestrator.simulation.planner", 130)],
    ids=["before the command", "in the command"],
)
def test_ctrl_c_while_the_command_line_imports_leaves_no_traceback(imported: str, code: int) -> None:
    program = f"""
import os, runpy, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {imported!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["atoll", "plan", "--islands", "8"]
runpy.run_module("api.cli", run_name="__main__", alter_sys=True)
"""
    command = python_process.code(program)
    ended = subprocess.run(
        command, env=python_process.cleaned(os.environ), capture_output=True, text=True, preexec_fn=interruptible
    )
    assert (ended.returncode, ended.stderr) == (code, "")
