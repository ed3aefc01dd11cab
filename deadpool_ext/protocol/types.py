"""Vocabulary shared by every part: seats, versions, shards, slots, layouts, plans.

Everything here is a frozen value. A *rank* is a seat (its coordinates never change during a job); a *node* fills
seats; a *generation* is one assignment of nodes to seats; a *version* is the state after iteration ``v`` as it was
computed in generation ``lineage``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

Rank = int
NodeId = str


class DeadpoolError(Exception):
    """Base of every error that Deadpool raises on purpose."""


class UsageError(DeadpoolError):
    """Something the user can change; printed as one line, exit code 2."""


class InvariantError(DeadpoolError):
    """A broken invariant of the protocol: a bug in Deadpool, never a fault of the environment."""


def invariant(holds: bool, statement: str) -> None:
    """Raise :class:`InvariantError` with ``statement`` (naming INV-n where there is one) unless ``holds``."""
    if not holds:
        raise InvariantError(statement)


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class Version:
    """State after iteration ``v`` (0 is the initial state) as computed in generation ``lineage``."""

    v: int
    lineage: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How seats are arranged. ``dp_groups`` lists the data-parallel groups as tuples of ranks, each in group order."""

    world_size: int
    ranks_per_node: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    dp_groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """Size and identity of the state that one rank keeps: fixed for the whole job, declared at ``train()`` entry."""

    rank: int
    shard_bytes: int
    meta_capacity: int  # bytes reserved in each slot for the metadata
    layout_digest: str  # 16 hex digits over names, shapes, dtypes and offsets of the flat shard


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotInfo:
    """One sealed slot found in an arena (a rank's own, or a hosted replica)."""

    rank: int  # the seat whose state it is
    version: Version
    layout_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """What a surviving worker says after it has unwound: the version its live tensors hold, ``dirty`` if torn."""

    rank: int
    live: Version | None
    dirty: bool


class SourceKind(enum.StrEnum):
    """Where a seat's state of the target version comes from."""

    KEEP = "keep"  # live tensors already hold it; only metadata is put back
    OWN_SLOT = "own_slot"  # the node's own arena
    REPLICA = "replica"  # a sealed replica hosted by another node, fetched into the node's own arena first


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatPlan:
    """One seat of a recovery plan. ``new_worker``: the process starts from set-up (a spare's, or a re-forked one)."""

    rank: int
    node: str
    new_worker: bool
    source: SourceKind
    source_node: str | None = None  # for REPLICA


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPlan:
    """Executable recovery: every seat ends at ``target`` (INV-1)."""

    generation: int
    target: Version
    seats: tuple[SeatPlan, ...]  # ordered by rank, exactly one per seat
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NoPlan:
    """No recovery from memory is possible, and why (names the seats that no copy is left of)."""

    reason: str
    seats: tuple[int, ...] = ()
