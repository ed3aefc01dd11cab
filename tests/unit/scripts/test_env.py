"""How the scripts find an interpreter, without installing anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BASE = sys._base_executable  # type: ignore[attr-defined]


def find_python(home: Path, path: list[Path], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the search with only ``path`` (and the system's tools) to look in."""
    system = [Path("/usr/bin"), Path("/bin")]
    environment = {"HOME": str(home), "PATH": os.pathsep.join(map(str, path + system)), **variables}
    command = f"set -euo pipefail; . {ROOT}/scripts/lib/env.sh; _dp_find_python"
    return subprocess.run(
        ["/bin/bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def works(path: Path) -> Path:
    """An interpreter in disguise: the one that this environment was made from, started by a script."""
    return executable(path, f'exec {BASE} "$@"')


@pytest.fixture(autouse=True)
def _no_system_python312() -> None:
    if Path("/usr/bin/python3.12").exists():
        pytest.skip("the system's own python3.12 would be found everywhere")


def test_a_shim_that_fails_is_passed_over(tmp_path: Path) -> None:
    executable(tmp_path / "shims" / "python3.12", "echo 'no version set' >&2; exit 127")
    good = works(tmp_path / "later" / "python3.12")
    found = find_python(tmp_path, [tmp_path / "shims", tmp_path / "later"])
    assert found.stdout.split() == [str(good)], found.stderr


@pytest.mark.parametrize(
    "place", [".pyenv/versions/3.12.1/bin/python", ".local/share/uv/python/cpython-3.12.9-linux/bin/python3.12"]
)
def test_version_managers_are_looked_into(tmp_path: Path, place: str) -> None:
    good = works(tmp_path / place)
    assert find_python(tmp_path, []).stdout.split() == [str(good)]


def test_the_users_choice_wins_and_is_not_second_guessed(tmp_path: Path) -> None:
    works(tmp_path / "bin" / "python3.12")
    chosen = works(tmp_path / "other" / "mine")
    assert find_python(tmp_path, [tmp_path / "bin"], PYTHON=str(chosen)).stdout.split() == [str(chosen)]
    wrong = find_python(tmp_path, [tmp_path / "bin"], PYTHON=str(tmp_path / "none"))
    assert wrong.returncode == 2
    assert wrong.stderr == f"deadpool: PYTHON={tmp_path / 'none'} does not run; Python 3.12 is needed\n"


@pytest.mark.parametrize("chosen", [False, True])
def test_an_activated_environment_is_not_what_the_next_one_is_made_from(tmp_path: Path, chosen: bool) -> None:
    """It may be the very one that is deleted and made anew."""
    here = Path(sys.executable)
    if sys.prefix == sys.base_prefix:
        pytest.skip("these tests do not run in an environment")
    found = find_python(tmp_path, [here.parent], **({"PYTHON": str(here)} if chosen else {}))
    assert found.stdout.split() == [BASE], found.stderr


def test_what_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "python3.12", "echo 'has no venv module'")
    found = find_python(tmp_path, [tmp_path / "bin"])
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert f"{tmp_path}/bin/python3.12 has no venv module" in found.stderr


@pytest.mark.parametrize("script", ["test.sh", "quickstart.sh"])
def test_scripts_explain_themselves_without_an_environment(script: str) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / script, "--help"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: scripts/{script}")
