"""Folders with packages that are not installed and that jobs may name: ``atoll up --packages FOLDER``, and ``atoll join``.

They come last on ``sys.path``, and a folder that contains the name of an existing module is refused, so they can shadow
neither Python's modules, nor atoll's, nor installed ones. The working folder and PYTHONPATH are never used
(``python_process``). ``atoll up --allow`` decides which packages a job may name.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path

from orchestrator.errors import ConfigurationError
from orchestrator.system import python_process

VARIABLE = "ATOLL_PACKAGES"
"""Passes the folders to a node's processes, as PYTHONPATH would."""
SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES)
REMEDY = (
    "Install it in atoll's environment on every node, or name its folder with `atoll up --packages FOLDER` (likewise "
    "`atoll join` and `atoll check`). The working folder and PYTHONPATH are not used."
)


def resolved(folders: Iterable[str]) -> tuple[str, ...]:
    """Return the folders with links resolved. Raises ConfigurationError for an unusable one, or one that would shadow."""
    named = tuple(folders)
    if "" in named:  # which would be the working folder
        raise ConfigurationError(detail="--packages is empty, as from an unset variable. Name a folder.")
    places = tuple(dict.fromkeys(map(os.path.realpath, named)))
    for place in places:
        _refuse_unfit(place)
    for place in places:
        clashes = [f"{name!r} ({owner})" for name in sorted(_names(place)) if (owner := _owner(name, place, places))]
        if clashes:
            raise ConfigurationError(
                detail=f"--packages {place}: {', '.join(clashes[:5])}{' …' * (len(clashes) > 5)} would not be found there, "
                "because modules of these names exist already. Rename them, or give a folder with only the jobs' packages."
            )
    return places


def variables(folders: Iterable[str]) -> dict[str, str]:
    """Return the variables with which a process finds packages in these folders."""
    text = os.pathsep.join(folders)
    return {VARIABLE: text} if text else {}


def child_environment(caller: Mapping[str, str], folders: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of a process that finds packages in these folders, or else in those of the caller's variable.

    Raises as ``resolved``.
    """
    return python_process.cleaned(caller) | variables(resolved(tuple(folders) or folders_in(caller)))


def folders_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders in an environment with ``variables``."""
    return tuple(folder for folder in environment.get(VARIABLE, "").split(os.pathsep) if os.path.isabs(folder))


def put_on_path() -> None:
    """Make the packages of this process's folders importable, after everything else. Idempotent."""
    sys.path += [folder for folder in folders_in(os.environ) if folder not in sys.path]


def is_there(package: str, folders: Iterable[str]) -> bool:
    """Return whether the top-level package can be found here. Runs none of its code."""
    top = package.partition(".")[0]
    return top in sys.builtin_module_names or PathFinder.find_spec(top, [*sys.path, *folders]) is not None


def is_in(package: str, folder: str) -> bool:
    """Return whether the top-level package is in this folder, as a file or a folder."""
    top = os.path.join(folder, package.partition(".")[0])
    return os.path.isdir(top) or os.path.isfile(f"{top}.py")


def _refuse_unfit(place: str) -> None:
    if not os.path.isdir(place):
        raise ConfigurationError(
            detail=f"--packages {place}: the folder does not exist. Give one that contains packages."
        )
    if not os.access(place, os.R_OK | os.X_OK):
        raise ConfigurationError(detail=f"--packages {place} is not readable by this user. Change its permissions.")
    if os.pathsep in place:
        raise ConfigurationError(detail=f"--packages {place}: its path contains {os.pathsep!r}. Rename the folder.")
    if os.stat(place).st_mode & stat.S_IWOTH:
        raise ConfigurationError(
            detail=f"--packages {place} is writable by all users, who could run code as you. Run chmod o-w {place}"
        )


def _names(place: str) -> Iterator[str]:
    """Yield the modules and packages that can be imported from this folder; a folder counts if it contains a module."""
    with os.scandir(place) as entries:
        for entry in entries:
            name = entry.name if entry.is_dir() else entry.name.partition(".")[0]
            importable = _modules_in(entry.path) if entry.is_dir() else entry.name.endswith(SUFFIXES)
            if name.isidentifier() and importable:
                yield name


def _modules_in(folder: str) -> bool:
    try:
        return any(name.endswith(SUFFIXES) for name in os.listdir(folder))
    except OSError:
        return False


def _owner(name: str, place: str, places: tuple[str, ...]) -> str:
    """Return the owner of a module of this name elsewhere; empty if there is none."""
    if name in sys.stdlib_module_names:
        return "of Python's library"
    others = [entry for entry in sys.path if entry != place]
    before = places[: places.index(place)]
    elsewhere = PathFinder.find_spec(name, [*others, *before])
    own = PathFinder.find_spec(name, [place])
    if elsewhere is None or own is None or _is_below(elsewhere, place):
        return ""
    if elsewhere.origin is None and own.origin is None:
        return ""  # two parts of one namespace
    return f"of {elsewhere.origin or ', '.join(elsewhere.submodule_search_locations or ())}"


def _is_below(spec: ModuleSpec, place: str) -> bool:
    """Return whether the module's other location, as of an editable install, is in this folder."""
    return spec.origin is not None and Path(place) in Path(spec.origin).resolve().parents
