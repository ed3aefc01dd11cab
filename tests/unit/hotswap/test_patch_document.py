"""docs/patches.md shows the patches that the code has."""

from __future__ import annotations

from pathlib import Path

from megatron.hotswap.patches.document import base_table, protected_table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "patches.md"


def test_tables_are_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in (base_table(), protected_table()):
        assert table in page, "run python -m megatron.hotswap.patches.document and put its tables into docs/patches.md"
