"""The environment of child processes: only names that are known to be needed, never the whole of the caller's.

Whoever runs ``atoll up`` has tokens, passwords and cloud credentials in their shell, and an island runs code that a job
names. So a name goes on only if it is here, or was given on purpose (``atoll up --pass-environment NAME``), as the
credentials must be of a store that islands write checkpoints to. A name that speaks of a secret goes on by being given only,
whatever its prefix.

Not here, on purpose: ``LD_PRELOAD`` (code in every process), ``PYTHONPATH`` and its like (``python_process``), ``RAY_*`` and
``ATOLL_*`` (what a process needs of them is set for it), proxies (their addresses hold passwords, and nothing of ours
fetches through one). Refuses to know who starts what.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from orchestrator import python_process
from orchestrator.errors import ConfigurationError

NAMES = frozenset(
    [
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_CACHE_HOME", "HOSTNAME"),
        *("VIRTUAL_ENV", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        *("HF_HOME", "HF_HUB_OFFLINE", "TF_CPP_MIN_LOG_LEVEL", "NO_COLOR", "COLUMNS"),
    ]
)
PREFIXES = (
    *("LC_", "CUDA_", "CUDNN_", "NVIDIA_", "NCCL_", "ROCM_", "HIP_", "HSA_", "TPU_", "LIBTPU_", "XLA_", "JAX_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_"),
)
"""Of settings of accelerators, their runtimes, and the libraries that count threads."""
SECRET = re.compile(r"(^|_)(\w*KEYS?|\w*TOKENS?|SECRETS?|PASS|PASSWD|PASSWORDS?|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def built(caller: Mapping[str, str], passed: Iterable[str] = ()) -> dict[str, str]:
    """The part of ``caller``'s environment that a child gets; ``passed`` are the names passed on purpose."""
    passed_on = frozenset(passed)
    needed = {name: value for name, value in caller.items() if name in passed_on or _needed(name)}
    return python_process.cleaned(needed)


def refuse_unset(caller: Mapping[str, str], passed: Iterable[str]) -> None:
    """Raises ConfigurationError for a name that cannot be passed on, so that a slip of the pen is not found by an island."""
    for name in passed:
        if not NAME.fullmatch(name):
            detail = f"--pass-environment {name.partition('=')[0]!r} is no name of a variable alone."
            raise ConfigurationError(detail=f"{detail} Set it in the environment, and give its name without a value.")
        if not python_process.is_harmless(name):
            detail = f"--pass-environment {name}: processes of atoll take no module from where it says."
            raise ConfigurationError(detail=f"{detail} Install your packages, or name their folder with --packages.")
        if name not in caller:
            detail = f"--pass-environment {name}: it is not set here. Set it and try again, or leave the option out."
            raise ConfigurationError(detail=detail)


def _needed(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and not SECRET.search(name))
