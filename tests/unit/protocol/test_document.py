"""docs/protocol.md shows the tables that the code has."""

from __future__ import annotations

from pathlib import Path

from deadpool_ext.protocol.document import deadline_table, message_table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "protocol.md"


def test_tables_are_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in (message_table(), deadline_table()):
        assert table in page, "run python -m deadpool_ext.protocol.document and put its tables into docs/protocol.md"
        assert "|  |" not in table, "a handler has no docstring"
