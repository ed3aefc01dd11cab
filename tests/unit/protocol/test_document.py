"""docs/protocol.md and docs/timeouts.md show the tables that the code has."""

from __future__ import annotations

from pathlib import Path

from deadpool_ext.protocol.document import deadline_table, message_table, order_table, timeout_table

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_tables_are_current() -> None:
    pages = {"protocol.md": (message_table(), deadline_table()), "timeouts.md": (timeout_table(), order_table())}
    for name, tables in pages.items():
        page = (DOCS / name).read_text(encoding="utf-8")
        for table in tables:
            assert table in page, f"run python -m deadpool_ext.protocol.document and put its tables into docs/{name}"
            assert "|  |" not in table, "a handler has no docstring"
