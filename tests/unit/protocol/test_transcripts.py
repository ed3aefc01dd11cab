"""Scenario transcripts of the coordinator, compared line by line with what it does now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.protocol.transcript import play

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    expected = path.read_text(encoding="utf-8")
    actual = play(expected)
    if os.environ.get("DEADPOOL_REWRITE"):
        path.write_text(actual, encoding="utf-8")
    assert actual.splitlines() == expected.splitlines(), f"{path.name}: DEADPOOL_REWRITE=1 to accept, then review"
