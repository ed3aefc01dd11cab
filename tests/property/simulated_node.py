"""What a simulated node holds: its queues, workers and slots; and the job that it belongs to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from deadpool_ext.protocol import messages as m
from deadpool_ext.protocol.config import CoordinatorConfig
from deadpool_ext.protocol.types import Layout, Rank, ShardSpec, SlotInfo, Version


def spec_of(rank: Rank) -> ShardSpec:
    return ShardSpec(rank=rank, shard_bytes=1000, meta_capacity=100, layout_digest=f"{rank:016x}")


@dataclass
class Worker:
    rank: Rank
    seated: int
    solo: bool = False
    phase: str = "construct"  # construct | wait | train | finished
    generation: int = 0  # generation whose groups it may use
    live: Version | None = None
    constructed: bool = False
    declared_failed: bool = False
    pause: int = -1  # the iteration after which it was asked to stand still
    passed: int = -1  # the one whose end it has left behind
    told: bool = False  # that it stands still
    hung: bool = False  # does nothing any more, and does not leave the step either
    moves: int = 0

    def vital(self, world: int, committed: Version | None) -> m.Vital:
        """How it looks from outside: before the step, at the gate, or in the step's one collective."""
        done = self.live.v if self.live is not None else 0
        training = self.phase == "train" and self.live is not None
        at_gate = training and not self.hung and (committed is None or committed.v < done)
        waits: tuple[m.Wait, ...] = ()
        if training and not self.hung and not at_gate:
            ranks = tuple(range(world))
            peers = tuple(rank for rank in ranks if rank != self.rank)
            step = m.Wait(group="world", ranks=ranks, operation="allreduce", number=done + 1, peers=peers, seconds=0.1)
            waits = (step,)
        return m.Vital(
            rank=self.rank,
            generation=self.generation,
            iteration=done + 1,
            place="setup" if not training else "gate" if at_gate else "forward",
            place_s=0.0,
            moves=self.moves,
            process="S",
            waits=waits,
            issued={"world": done + 1 if waits else done},
        )


@dataclass
class Node:
    name: str
    to_node: deque[Any] = field(default_factory=deque)
    to_coordinator: deque[Any] = field(default_factory=deque)
    alive: bool = True
    silent: bool = False  # partitioned away: nothing passes in either direction
    sick: bool = False  # fails its health checks
    generation: int = -1
    frozen: bool = False
    welcome: bool = False
    workers: dict[Rank, Worker] = field(default_factory=dict)
    own: dict[Rank, list[Version]] = field(default_factory=dict)  # sealed slots, oldest first, at most two
    hosted: dict[Rank, list[Version]] = field(default_factory=dict)
    spoilt: set[tuple[Rank, Version]] = field(default_factory=set)  # hosted copies that fail verification
    spoilt_own: set[tuple[Rank, Version]] = field(default_factory=set)  # own slots that do
    board: Version | None = None  # committed world-wide in this generation, as this node knows
    replicate: m.Replicate | None = None
    plan: Any = None
    fetches: set[Rank] = field(default_factory=set)

    def say(self, message: Any) -> None:
        self.to_coordinator.append(message)


@dataclass(frozen=True)
class Fault:
    """``kind``: kill, silence, exit, hang, collective, join, leave, return, swap,
    drain, spoil or spoil_own. ``after``: actions so far."""

    kind: str
    after: int
    victim: int


def slots_of(table: dict[Rank, list[Version]]) -> tuple[SlotInfo, ...]:
    return tuple(
        SlotInfo(rank=rank, version=version, layout_digest=f"{rank:016x}")
        for rank, slots in sorted(table.items())
        for version in slots
    )


def make_config(
    layout: Layout, *, nodes: int, spares: int, faults: tuple[dict[str, Any], ...] = (), **changes: Any
) -> CoordinatorConfig:
    job = m.JobSpec(job_id="job", argv=("train.py",), cwd="/", env={}, layout=layout, faults=faults)
    return CoordinatorConfig(job=job, nodes=nodes, spares=spares, **changes)
