"""Builds ``orchestrator/parameters/kernels/native`` when the package is built or installed: hatchling's hook.

The extension is put beside its source, where an editable install imports it and a wheel takes it from.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("orchestrator", "parameters", "kernels")
COMPILER_FLAGS = ["-std=c11", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-Wall", "-Wno-psabi"]
"""Without contraction to fused multiply-adds, which would give other bits where a processor has them. Square roots set no
errno, so that they are computed several at a time; each is still the one of IEEE 754."""


class KernelsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        from Cython.Build import cythonize
        from setuptools import Distribution, Extension

        os.chdir(self.root)
        extension = Extension(
            ".".join((*KERNELS.parts, "native")),
            [str(KERNELS / "native.pyx"), str(KERNELS / "kernels.c")],
            depends=[str(KERNELS / "kernels.h"), str(KERNELS / "loops.h")],
            include_dirs=[str(KERNELS)],
            extra_compile_args=COMPILER_FLAGS,
            extra_link_args=["-pthread"],
        )
        (translated,) = cythonize([extension], build_dir="build/kernels", quiet=True)
        translated.optional = True  # without a compiler or Python's headers the twin in NumPy does it, and says so
        distribution = Distribution({"ext_modules": [translated]})
        command = distribution.get_command_obj("build_ext")
        command.inplace, command.build_temp, command.force = True, "build/kernels", True
        command.ensure_finalized()
        command.run()
        build_data["pure_python"], build_data["infer_tag"] = False, True
        build_data["artifacts"].append(f"/{KERNELS}/*.so")
