"""Builds the two C++ extensions; everything else about the package is in pyproject.toml.

``deadpool_ext._shell`` (csrc/comm) is compiled against the installed torch and needs no CUDA toolkit: NCCL
communicators are made through torch's own Python classes. ``deadpool_ext._native`` (csrc/native) needs no torch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
COMMON_FLAGS = ["-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def _sources(folder: str) -> tuple[list[str], list[str]]:
    """Sources and headers of ``csrc/<folder>``, relative to the root."""
    base = Path("csrc", folder)
    return (
        sorted(str(path) for path in base.glob("*.cpp")),
        sorted(str(path) for path in base.glob("*.h*")),
    )


def _shell_extension() -> Extension:
    # Found, not imported: the import costs seconds and touches CUDA.
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            "deadpool: building needs the torch that the job will run with, and this Python has none. Install it first "
            "(pip install torch==2.13.0) and build with --no-build-isolation; scripts/quickstart.sh does both."
        )
    torch = Path(spec.submodule_search_locations[0])
    sources, headers = _sources("comm")
    return Extension(
        "deadpool_ext._shell",
        sources=sources,
        depends=headers,
        language="c++",
        extra_compile_args=[
            # As system headers, so that warnings are about our code.
            f"-isystem{torch / 'include'}",
            f"-isystem{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
            "-std=c++20",
            "-O2",
            *COMMON_FLAGS,
        ],
        library_dirs=[str(torch / "lib")],
        libraries=["c10", "torch", "torch_cpu", "torch_python"],
    )


def _native_extension() -> Extension:
    sources, headers = _sources("native")
    includes = []
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        includes = [f"-isystem{pybind11.get_include()}"]
    return Extension(
        "deadpool_ext._native",
        sources=sources,
        depends=headers,
        language="c++",
        # No -march: the code asks the processor at run time what it can do, so one build serves all nodes.
        extra_compile_args=[*includes, "-std=c++17", "-O3", *COMMON_FLAGS],
        extra_link_args=["-pthread"],
    )


class BuildExtensions(build_ext):
    """Both at once, with one clear line when there is no compiler."""

    def run(self) -> None:
        if not self.extensions:
            return
        compiler = os.environ.get("CXX", "c++").split()[0]
        if shutil.which(compiler) is None and shutil.which("g++") is None:
            sys.exit(
                f"deadpool: no C++ compiler ({compiler}). Install one that knows C++20 (Debian and Ubuntu: "
                "apt install g++; Red Hat: dnf install gcc-c++) or set CXX."
            )
        self.parallel = self.parallel or len(self.extensions)
        super().run()


os.chdir(ROOT)
setup(
    ext_modules=[_shell_extension(), _native_extension()],
    cmdclass={"build_ext": BuildExtensions},
)
