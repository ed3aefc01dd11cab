"""The coordinator's tables as Markdown, for docs/protocol.md."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from deadpool_ext.protocol.coordinator import DEADLINES, TABLE
from deadpool_ext.protocol.state import State


def message_table() -> str:
    """One line per message and state in which it has an effect."""
    lines = ["| state | message | what happens |", "|---|---|---|"]
    for state in State:
        for (where, message), handler in TABLE.items():
            if where is state:
                lines.append(f"| {state.value} | {message.__name__} | {_first_line(handler)} |")
    return "\n".join(lines)


def deadline_table() -> str:
    """One line per deadline."""
    lines = ["| deadline | what happens when it passes |", "|---|---|"]
    lines += [f"| {kind} | {_first_line(handler)} |" for kind, handler in DEADLINES.items()]
    return "\n".join(lines)


def _first_line(handler: Callable[..., Any]) -> str:
    return (inspect.getdoc(handler) or "").splitlines()[0]


if __name__ == "__main__":
    print(message_table(), deadline_table(), sep="\n\n")
