"""Which Python, torch and Megatron this program is written against, checked without importing any of them."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

from deadpool_ext.protocol.types import UsageError

PYTHON = (3, 12)
TORCH = "2.13"
MEGATRON = "0.19.2"
INSTALL = f"pip install 'megatron-core[training]=={MEGATRON}'"


def check() -> None:
    """Raise :class:`UsageError`, one line that says what to install, unless all three are the supported ones."""
    check_python(sys.version_info[:2])
    check_torch(_installed("torch"))
    check_megatron(_installed("megatron-core"))
    for package in ("megatron.core", "megatron.training"):
        check_origin(package)


def check_python(version: tuple[int, ...]) -> None:
    """Python must be 3.12: the one that the supported torch and Megatron wheels are pinned for."""
    if version != PYTHON:
        raise UsageError(f"Python {_dotted(PYTHON)} is needed, this is {_dotted(version)}")


def check_torch(version: str | None) -> None:
    """torch must be of the 2.13 series."""
    if version is None or not version.startswith(TORCH + "."):
        raise UsageError(f"torch {TORCH} is needed, found {version or 'none'}: pip install 'torch=={TORCH}.*'")


def check_megatron(version: str | None) -> None:
    """megatron-core must be exactly the supported release: patches are written against its source."""
    if version != MEGATRON:
        raise UsageError(f"megatron-core {MEGATRON} is needed, found {version or 'none'}: {INSTALL}")


def check_origin(package: str) -> None:
    """``package`` must be found where the supported distribution is installed, not in some other source tree."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise UsageError(f"{package} is not installed (megatron-core has no trainer without its extra): {INSTALL}")
    relative = Path(*package.split("."), "__init__.py")
    installed = Path(str(metadata.distribution("megatron-core").locate_file(relative)))
    if Path(found.origin).resolve() != installed.resolve():
        raise UsageError(
            f"{package} would come from {Path(found.origin).parent}, not from the installed megatron-core {MEGATRON}: "
            "take that directory off PYTHONPATH"
        )


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
