"""Shared by all tests: kinds by folder, one seed, and what a failed run left behind."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

KINDS = ("unit", "property", "integration", "cluster", "gpu")
ROOT = Path(__file__).resolve().parent
SEED = int(os.environ.get("DEADPOOL_TEST_SEED") or random.SystemRandom().randrange(2**32))
LOG_TAIL_LINES = 25

# Shared and busy machines make single examples slow; that says nothing about the code.
settings.register_profile("deadpool", deadline=None, print_blob=True)
settings.load_profile("deadpool")


def pytest_report_header() -> str:
    """Which seed the ``seed`` fixture uses, and how to use it again."""
    return f"seed: DEADPOOL_TEST_SEED={SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's kind is the folder it lives in."""
    for item in items:
        if item.path.is_relative_to(ROOT):
            kind = item.path.relative_to(ROOT).parts[0]
            if kind in KINDS:
                item.add_marker(kind)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test alone, derived from the run's; both are shown when the test fails."""
    own = zlib.crc32(f"{SEED}/{request.node.nodeid}".encode())
    request.node.user_properties.append(("seed", own))
    return own


@pytest.fixture
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where a test's job writes; kept when the test fails, with the end of its logs in the report."""
    path = tmp_path / "run"
    request.node.user_properties.append(("run_dir", str(path)))
    return path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds seeds and the tails of a run directory's files to the report of a failed test."""
    report = yield
    if report.failed:
        known = dict(item.user_properties)
        if "seed" in known:
            report.sections.append(("seed", f"{known['seed']} (DEADPOOL_TEST_SEED={SEED})"))
        if "run_dir" in known:
            run = Path(str(known["run_dir"]))
            report.sections.append(("run directory", f"{run}\n{_tails(run)}"))
    return report


def _tails(run: Path) -> str:
    parts = []
    for path in [run / "events.jsonl", *sorted(run.glob("logs/**/*.log"))]:
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
            parts.append(f"--- {path.relative_to(run)}\n" + "\n".join(lines))
    return "\n".join(parts)
