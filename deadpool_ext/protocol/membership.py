"""Who is in the job: nodes, the seats they fill, spares, and names that may not come back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from deadpool_ext.protocol.deadlines import Deadlines
from deadpool_ext.protocol.layout import node_key
from deadpool_ext.protocol.messages import Hello, NodeAddress
from deadpool_ext.protocol.types import Layout, NodeId, Rank, invariant

GAP_FACTOR: Final = 3.0  # a silence that a node outlived may come back, and somewhat longer
GAP_MEMORY_S: Final = 600.0  # then it is forgotten


@dataclass(slots=True, kw_only=True)
class Member:
    """One connected node."""

    node: NodeId
    pid: int
    address: NodeAddress
    last_heard: float  # monotonic seconds
    process: str = ""  # see Hello
    ready: bool = False  # its workers are warm
    assigned: bool = False  # it was told to seat workers, so it has something to fence
    slow: bool = False  # it was replaced because others were faster at the same work
    unfit: str = ""  # what its health checks found that a node should not train with
    gaps: deque[tuple[float, float]] = field(default_factory=deque)  # (when it ended, seconds) of long silences

    def heard(self, now: float, deadlines: Deadlines) -> None:
        """A message came. A silence before it that was long enough to matter is remembered for a while."""
        gap = now - self.last_heard
        if GAP_FACTOR * gap > deadlines.node_timeout_s:
            self.gaps.append((now, gap))
        while self.gaps and self.gaps[0][0] < now - GAP_MEMORY_S:
            self.gaps.popleft()
        self.last_heard = now

    def timeout_s(self, deadlines: Deadlines) -> float:
        """Silence after which this node is lost: ``node_timeout_s``, more (at most ``node_timeout_max_s``) if it was
        silent for long and came back lately."""
        longest = max((gap for _, gap in self.gaps), default=0.0)
        return max(deadlines.node_timeout_s, min(GAP_FACTOR * longest, deadlines.node_timeout_max_s))


class Membership:
    """Members and seats. Plain bookkeeping: it decides only which spare comes next."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.members: dict[NodeId, Member] = {}
        self.seat_nodes: list[NodeId] = []  # index: rank; empty until the job starts
        self.gone: dict[NodeId, str] = {}  # nodes that held seats and were lost, and are not back
        self._expelled: dict[tuple[NodeId, str], str] = {}  # agents that were, with the reason: never back

    def refusal(self, hello: Hello) -> str | None:
        """Why a node may not join, or None."""
        if hello.node in self.members:
            return f"a node named {hello.node} is a member already"
        if (reason := self._expelled.get((hello.node, hello.process))) is not None:
            return f"this process of node {hello.node} was given up ({reason}); started anew, the node can be a spare"
        if hello.node in self.seat_nodes:
            return f"node {hello.node} was lost, and the job is at its end"
        if hello.workers < self.layout.ranks_per_node:
            return (
                f"{hello.workers} workers, but a node of this job fills {self.layout.ranks_per_node} seats: "
                f"start it with --ranks-per-node {self.layout.ranks_per_node}"
            )
        return None

    def admit(self, hello: Hello, now: float) -> Member:
        """Add a node that :meth:`refusal` has nothing against."""
        invariant(self.refusal(hello) is None, f"node {hello.node} admitted although it must be refused")
        member = Member(node=hello.node, pid=hello.pid, address=hello.address, last_heard=now, process=hello.process)
        self.members[hello.node] = member
        self.gone.pop(hello.node, None)
        return member

    def remove(self, node: NodeId, reason: str) -> tuple[Rank, ...]:
        """Drop a member; returns the seats it leaves empty.

        Of a node that held seats, this process may not come back; a new one may, as a spare.
        """
        seats = self.seats_of(node)
        member = self.members.pop(node)
        if seats:
            self.gone[node] = reason
            self._expelled[node, member.process] = reason
        return seats

    def seat(self, nodes: list[NodeId]) -> None:
        """Fill all seats for the first time, ``nodes`` in order of their first seat."""
        invariant(not self.seat_nodes, "seats are filled once")
        width = self.layout.ranks_per_node
        self.seat_nodes = [nodes[rank // width] for rank in range(self.layout.world_size)]

    def replace(self, lost: NodeId, spare: NodeId) -> None:
        """All seats of ``lost`` go to ``spare``."""
        invariant(spare in self.members and spare not in self.seat_nodes, f"{spare} is no spare")
        self.seat_nodes = [spare if node == lost else node for node in self.seat_nodes]

    def give_back(self, newcomer: NodeId, holder: NodeId) -> None:
        """A planned swap is undone: the seats that ``newcomer`` took are ``holder``'s again."""
        self.seat_nodes = [holder if node == newcomer else node for node in self.seat_nodes]

    def seats_of(self, node: NodeId) -> tuple[Rank, ...]:
        """Seats that ``node`` fills, ascending; empty for a spare."""
        return tuple(rank for rank, holder in enumerate(self.seat_nodes) if holder == node)

    @property
    def active(self) -> list[NodeId]:
        """Nodes that fill seats, in order of their first seat (a lost one included until it is replaced)."""
        return list(dict.fromkeys(self.seat_nodes))

    @property
    def spares(self) -> list[NodeId]:
        """Nodes without a seat in the order in which they are used: healthy before unfit, fast before slow, warm before
        cold, by name."""
        free = [node for node in self.members if node not in self.seat_nodes]
        members = self.members

        def order(node: NodeId) -> tuple[Any, ...]:
            member = members[node]
            return bool(member.unfit), member.slow, not member.ready, node_key(node)

        return sorted(free, key=order)

    def in_order(self, *, ready: bool = False) -> list[NodeId]:
        """Members in natural order of their names; ``ready``: only warm ones."""
        return sorted((name for name, member in self.members.items() if member.ready or not ready), key=node_key)

    def addresses(self) -> tuple[NodeAddress, ...]:
        """Replicators of the active nodes, in order of their first seat."""
        return tuple(self.members[node].address for node in self.active)

    def silent(self, now: float, deadlines: Deadlines) -> dict[NodeId, float]:
        """Members not heard of for too long, and for each how long is too long."""
        timeouts = {name: self.members[name].timeout_s(deadlines) for name in self.in_order()}
        return {name: limit for name, limit in timeouts.items() if now - self.members[name].last_heard >= limit}

    def silences(self, deadlines: Deadlines) -> list[float]:
        """When each member's silence will have been too long."""
        return [member.last_heard + member.timeout_s(deadlines) for member in self.members.values()]

    def shift(self, seconds: float) -> None:
        """Forgive everybody ``seconds`` of silence: nobody was listening."""
        for member in self.members.values():
            member.last_heard += seconds
