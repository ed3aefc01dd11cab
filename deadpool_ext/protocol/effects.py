"""Events that go into the coordinator machine and effects that come out of it, as frozen values.

The shell around the machine does what the effects say, in order, and nothing else. It owns sockets, clocks and files;
the machine owns every decision. All times are monotonic seconds of the machine that the coordinator runs on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# ---- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FromNode:
    """A message arrived from an agent.

    ``connection`` identifies the connection it came on. For a :class:`Hello` it is needed to refuse a second
    connection under a name that is a member already: the shell binds ``node`` to the connection of its last Hello
    that was *not* answered by :class:`Refuse`, and reports messages and the end (:class:`NodeLost`) of bound
    connections only.
    """

    node: str
    message: Any
    connection: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FromOperator:
    """A message arrived from a launcher or command line (``OperatorHello``, ``Struck``)."""

    message: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost:
    """The bound connection of a node ended. Silence is not the shell's business: the machine watches heartbeats."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time passed. Send one at least every ``Deadlines.heartbeat_s`` and at ``Coordinator.wake_at``."""


Event = FromNode | FromOperator | NodeLost | Tick

# ---- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send ``message`` to the agent bound to ``node``; drop it silently if the connection is gone."""

    node: str
    message: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse:
    """Answer ``Refused(reason)`` on ``connection`` and close it; whoever is bound to ``node`` is not touched."""

    node: str
    connection: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Disconnect:
    """Flush, close and unbind the connection of ``node``: it was declared lost. No :class:`NodeLost` follows."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SendOperators:
    """Send ``message`` to every connected operator."""

    message: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """A line of ``events.jsonl``.

    The shell adds ``t`` and ``mono`` (``mono`` overrides the latter when set: the event happened then), writes the
    line and passes it to the operators as ``Progress(kind="event")``.
    """

    event: str
    generation: int
    fields: dict[str, Any] = field(default_factory=dict)
    node: str | None = None
    rank: int | None = None
    mono: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteStep:
    """A line of ``steps.jsonl``; the shell also passes it to the operators as ``Progress(kind="step")``."""

    record: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteFinal:
    """The content of ``final.json``; emitted at most once, before :class:`Exit`."""

    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteStatus:
    """The content of ``status.json``, to be replaced atomically. Only the last one of a batch matters."""

    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """The coordinator is done: flush connections and files, then exit with ``code``. Always the last effect."""

    code: int
    reason: str


Effect = Send | Refuse | Disconnect | SendOperators | Log | WriteStep | WriteFinal | WriteStatus | Exit
