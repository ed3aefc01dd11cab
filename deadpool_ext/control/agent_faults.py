"""The agent's part in faults on purpose: hitting a process of its node, itself included, or the node's memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from deadpool_ext.control import processes
from deadpool_ext.control.node_memory import NodeMemory
from deadpool_ext.protocol.messages import Strike, Struck

#: kind -> (whose process, with everything below it, signal)
_SIGNALS: Final = {
    "kill-rank": ("worker", False, signal.SIGKILL),
    "stop-rank": ("worker", False, signal.SIGSTOP),
    "kill-replicator": ("replicator", False, signal.SIGKILL),
    "kill-node": ("agent", True, signal.SIGKILL),
    "kill-spare": ("agent", True, signal.SIGKILL),
    "stop-node": ("agent", True, signal.SIGSTOP),
    "kill-agent": ("agent", False, signal.SIGKILL),
    "stop-agent": ("agent", False, signal.SIGSTOP),
}
#: kind -> whether a hosted replica is hit, or the rank's own slot
_FLIPS: Final = {"corrupt-slot": False, "corrupt-replica": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Pids; 0 where there is none."""

    agent: int
    worker: int
    replicator: int


async def carry_out(
    strike: Strike,
    targets: Targets,
    memory: NodeMemory,
    tell: Callable[[object], Awaitable[None]],
    warn: Callable[[str], None],
) -> None:
    """Do what ``strike`` says. ``tell`` delivers a message before it returns; ``warn`` says what cannot be done."""
    kind = str(strike.fault["kind"])
    if kind in _FLIPS and strike.rank is not None:
        if memory.flip_bit(strike.rank, hosted=_FLIPS[kind]) is None:
            warn(f"fault {strike.fault['id']}: no sealed copy of rank {strike.rank} on {strike.node} for {kind}")
        # Told afterwards: whoever stands at the fault goes on when this is known.
        await tell(Struck(fault=strike.fault, node=strike.node, rank=strike.rank, mono=time.monotonic()))
        return
    known = _SIGNALS.get(kind)
    pid = getattr(targets, known[0]) if known is not None else 0
    if known is None or not pid:
        warn(f"fault {strike.fault['id']}: {kind} cannot be carried out on {strike.node}")
        return
    # Told first: the time is the blow's, and nothing can be told after some of them.
    await tell(Struck(fault=strike.fault, node=strike.node, rank=strike.rank, mono=time.monotonic()))
    hit(pid, whole_tree=known[1], number=known[2])


def hit(pid: int, *, whole_tree: bool, number: int) -> None:
    """Send a signal to a process, and to what is below it; the process itself last where it is this one."""
    pids = [pid, *(processes.descendants(pid) if whole_tree else [])]
    for victim in sorted(pids, key=lambda other: other == os.getpid()):
        processes.send_signal(victim, number)


def signal_of(kind: str) -> tuple[bool, int] | None:
    """(whole tree, signal) of a kind that hits an agent's process, or None."""
    known = _SIGNALS.get(kind)
    return (known[1], known[2]) if known is not None and known[0] == "agent" else None
