"""What stands in the way is named in one line, before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_ext.protocol.types import UsageError
from megatron.hotswap import versions

ROOT = Path(__file__).resolve().parents[3]


def run(*argv: str, pythonpath: Path | None = None, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *argv],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "", **({"PYTHONPATH": str(pythonpath)} if pythonpath else {}), **(environment or {})},
    )
    return done.returncode, done.stdout, done.stderr


def package(root: Path, *names: str) -> Path:
    for name in names:
        folder = root.joinpath(*name.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    return root


def test_what_is_installed_here_is_supported() -> None:
    versions.check()


@pytest.mark.parametrize("version", [(3, 11), (3, 13)])
def test_another_python_is_refused(version: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"^Python 3\.12 is needed, this is 3\."):
        versions.check_python(version)


@pytest.mark.parametrize("version", [None, "2.12.1", "2.130.0"])
def test_another_torch_is_refused(version: str | None) -> None:
    with pytest.raises(UsageError, match=r"^torch 2\.13 is needed, found "):
        versions.check_torch(version)


@pytest.mark.parametrize("version", [None, "0.16.1", "0.19.20"])
def test_another_megatron_is_refused(version: str | None) -> None:
    with pytest.raises(UsageError, match=r"^megatron-core 0\.19\.2 is needed, found .*pip install"):
        versions.check_megatron(version)


def test_a_source_tree_before_the_installed_trainer_is_named(tmp_path: Path) -> None:
    # A checkout of upstream has no megatron/__init__.py either, so its portion comes first in the namespace.
    elsewhere = package(tmp_path, "megatron.training")
    code, _, error = run("--help", pythonpath=elsewhere)
    assert code == 2
    assert len(error.splitlines()) == 1
    assert str(elsewhere / "megatron" / "training") in error and "PYTHONPATH" in error


def test_a_foreign_megatron_package_is_named(tmp_path: Path) -> None:
    # A regular package wins over namespace portions, also over those that come before it on the path.
    elsewhere = package(tmp_path, "megatron")
    code, _, error = run("--help", pythonpath=elsewhere)
    assert code == 2
    assert len(error.splitlines()) == 1
    assert str(elsewhere / "megatron" / "__init__.py") in error


@pytest.mark.parametrize("flag", ["--deadpool", "--deadpool-snapshot-params"])
def test_protection_without_a_launcher_names_the_launchers(flag: str) -> None:
    code, output, error = run(flag, "--num-layers", "2")
    assert code == 2 and output == ""
    assert len(error.splitlines()) == 1
    assert "deadpool local" in error and "deadpool launch" in error
