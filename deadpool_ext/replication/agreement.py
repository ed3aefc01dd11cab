"""When is a version committed? The agreement among replicators, as a pure state machine.

A node is *done* with v when every own rank's slot of v is sealed and all targets of that rank acknowledged their
replica. v is committed when every member is done with it. Both are cumulative: a rank can only have v + 1 because v
had been committed, so "v + 1" says everything that "v" would. Messages may come late, twice, or in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from deadpool_ext.protocol.types import NodeId, Rank, Version, invariant

# ---- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSealed:
    """An own rank's slot of this version is sealed."""

    rank: Rank
    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaAcked:
    """``node`` verified and sealed the replica of an own rank."""

    rank: Rank
    node: NodeId
    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerDone:
    """Another member says that it is done with this version."""

    node: NodeId
    generation: int
    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerConnected:
    """A new connection to another member: what was said on the last one may be lost."""

    node: NodeId


Event = OwnSealed | ReplicaAcked | PeerDone | PeerConnected

# ---- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SendDone:
    """Tell ``to`` that this node is done with ``version``; supersedes what was not sent yet."""

    to: NodeId
    generation: int
    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """``version`` is committed world-wide."""

    generation: int
    version: Version


Effect = SendDone | Commit


class Agreement:
    """One node's part in one generation.

    ``targets``: own rank -> nodes that must hold its replica (an empty collection: unprotected).
    """

    def __init__(
        self,
        *,
        node: NodeId,
        generation: int,
        members: Collection[NodeId],
        targets: Mapping[Rank, Collection[NodeId]],
    ) -> None:
        invariant(node in members, f"{node} is not a member of generation {generation}")
        invariant(len(targets) > 0, f"member {node} has no seat in generation {generation}")
        self.node = node
        self.generation = generation
        self._others = tuple(sorted(set(members) - {node}))
        self._sealed: dict[Rank, Version | None] = dict.fromkeys(targets)
        self._acked: dict[tuple[Rank, NodeId], Version | None] = {
            (rank, target): None for rank, nodes in targets.items() for target in nodes
        }
        self._done: dict[NodeId, Version | None] = dict.fromkeys((node, *self._others))
        self._committed: Version | None = None

    @property
    def done(self) -> Version | None:
        """What this node is done with."""
        return self._done[self.node]

    @property
    def committed(self) -> Version | None:
        """The newest version committed in this generation, as far as this node knows."""
        return self._committed

    def handle(self, event: Event) -> list[Effect]:
        """Take one event in. Raises InvariantError for ranks and targets that are not this node's, and for two
        members being done with the same iteration in different lineages (INV-1; nothing is committed then)."""
        match event:
            case OwnSealed(rank=rank, version=version):
                invariant(rank in self._sealed, f"rank {rank} is not an own rank of {self.node}")
                self._sealed[rank] = _later(self._sealed[rank], version)
                return self._advance()
            case ReplicaAcked(rank=rank, node=node, version=version):
                key = (rank, node)
                invariant(key in self._acked, f"{node} is not a target of rank {rank}")
                self._acked[key] = _later(self._acked[key], version)
                return self._advance()
            case PeerDone(node=node, generation=generation, version=version):
                if generation != self.generation or node not in self._others:
                    return []  # INV-4
                self._done[node] = _later(self._done[node], version)
                return self._commit()
            case PeerConnected(node=node):
                done = self.done
                if done is None or node not in self._others:
                    return []
                return [SendDone(to=node, generation=self.generation, version=done)]

    def _advance(self) -> list[Effect]:
        done = _earliest([*self._sealed.values(), *self._acked.values()])
        if done is None or done == self.done:
            return []
        self._done[self.node] = done
        told: list[Effect] = [SendDone(to=peer, generation=self.generation, version=done) for peer in self._others]
        return told + self._commit()

    def _commit(self) -> list[Effect]:
        agreed = _earliest(list(self._done.values()))
        if agreed is None or agreed == self._committed:
            return []
        lineages = {done.lineage for done in self._done.values() if done is not None and done.v == agreed.v}
        invariant(len(lineages) == 1, f"INV-1: members are done with version {agreed.v} of lineages {sorted(lineages)}")
        self._committed = agreed
        return [Commit(generation=self.generation, version=agreed)]


def _later(known: Version | None, version: Version) -> Version:
    return version if known is None else max(known, version)


def _earliest(versions: list[Version | None]) -> Version | None:
    """The minimum; None while any is missing."""
    known = [version for version in versions if version is not None]
    return min(known) if len(known) == len(versions) else None
