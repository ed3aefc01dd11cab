"""What launchers and commands, and the coordinator, tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorHello:
    """A launcher that can strike nodes from outside (those whose process trees it owns) and shows progress."""

    name: str
    nodes: tuple[str, ...] = ()  # whose process trees it owns


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRequest:
    """A person, or a script, asks something of the running job. ``command``: inject, swap, drain."""

    request: str  # chosen by who asks; the answers carry it
    command: str
    arguments: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorAnswer:
    """The answer to an OperatorRequest, in one line. Not ``final``: accepted, and another one follows."""

    request: str
    ok: bool
    final: bool
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """Coordinator -> operator, or agent (which passes it on to the ranks that do it themselves): do this now."""

    fault: dict[str, Any]
    node: str
    rank: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Struck:
    """The answer: done, at this monotonic time (of the machine that did it) in seconds."""

    fault: dict[str, Any]
    node: str
    rank: int | None
    mono: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AddFault:
    """Coordinator -> agent -> workers: one more fault of the job, given while it runs."""

    fault: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOver:
    """Coordinator -> agent -> workers: whoever stands at this fault goes on, if he still can."""

    fault_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Coordinator -> operator: an event or a step, as written to the run directory."""

    kind: str  # "event" | "step"
    record: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEnded:
    """Coordinator -> operator: exit code and reason; the coordinator exits next."""

    code: int
    reason: str
