"""The coordinator's tables as Markdown, for docs/protocol.md and docs/timeouts.md."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from deadpool_ext.protocol.coordinator import DEADLINES, TABLE
from deadpool_ext.protocol.deadlines import FACTORS, ORDERED, TIMES, Deadlines
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


def timeout_table() -> str:
    """One line per field of :class:`Deadlines`."""
    lines = ["| name | default | counts from | when it has passed | set it |", "|---|---|---|---|---|"]
    for item in dataclasses.fields(Deadlines):
        default = f"{item.default:g}" if item.name in FACTORS else f"{item.default:g} s"
        start, end = item.metadata["start"], item.metadata["end"]
        lines.append(f"| `{item.name}` | {default} | {start} | {end} | `--deadline {item.name}={item.default:g}` |")
    return "\n".join(lines)


def order_table() -> str:
    """One line per pair that must be in order."""
    lines = ["| must not be longer than | | because |", "|---|---|---|"]
    for shorter, longer, why in ORDERED:
        times = TIMES.get((shorter, longer))
        what = "" if times is None else ", nor as long" if times == 1 else f" / {times:g}"
        lines.append(f"| `{shorter}` | `{longer}`{what} | {why} |")
    return "\n".join(lines)


def _first_line(handler: Callable[..., Any]) -> str:
    return (inspect.getdoc(handler) or "").splitlines()[0]


if __name__ == "__main__":
    print(message_table(), deadline_table(), timeout_table(), order_table(), sep="\n\n")
