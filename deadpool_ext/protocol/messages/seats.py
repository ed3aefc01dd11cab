"""What agents and their workers tell each other, besides what the agent passes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deadpool_ext.protocol.messages.job import JobSpec
from deadpool_ext.protocol.types import WorkerState


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeSeat:
    """Tells a warm worker who it is. Environment, argv and log file come from the job."""

    rank: int
    local_rank: int
    generation: int
    solo: bool
    job: JobSpec
    board_path: str  # the node's board (shared words: fence, commit)
    pulse_path: str = ""  # where this worker shows how it is (deadpool_ext.comm.pulse)
    stack_path: str = ""  # where it writes its stack when asked to (deadpool_ext.control.stacks)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaReady:
    """The rank's own arena segment exists (path below /proc/AGENT_PID/fd)."""

    generation: int
    rank: int
    segment_path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerHello:
    """First message of a warm worker on the agent's socket."""

    pid: int
    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFenced:
    """The worker's shells reject operations of older generations and those in flight were aborted."""

    generation: int
    rank: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerUnwound:
    """The main thread is back in the resilient loop and holds no operation of an older generation."""

    generation: int
    state: WorkerState
    detail: str
