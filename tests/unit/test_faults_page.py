"""Every situation of docs/faults.md is shown by tests of its number, or listed here as open."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Not answered by the product yet: the loss of the coordinator, and durable saves that fail.
OPEN = {3, 14}


def test_every_situation_has_tests_of_its_number() -> None:
    rows = {int(number) for number in re.findall(r"^\| F(\d+) \|", (ROOT / "docs" / "faults.md").read_text(), re.M)}
    named: set[int] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^(?:async )?def test_((?:f\d+_)+)", path.read_text(encoding="utf-8"), re.M):
            named |= {int(number) for number in re.findall(r"f(\d+)_", name)}
    assert rows - named == OPEN
    assert named <= rows
