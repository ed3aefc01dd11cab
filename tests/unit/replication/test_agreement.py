"""The commit agreement: by example, and against a naive model over a network that delays, repeats and forgets."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deadpool_ext.protocol.types import InvariantError, Version
from deadpool_ext.replication.agreement import (
    Agreement,
    Commit,
    OwnSealed,
    PeerConnected,
    PeerDone,
    ReplicaAcked,
    SendDone,
)


def at(v: int, lineage: int = 0) -> Version:
    return Version(v=v, lineage=lineage)


def two_nodes() -> Agreement:
    return Agreement(node="a", generation=1, members=["a", "b"], targets={0: ["b"], 1: ["b", "c"]})


def test_done_needs_every_slot_and_every_target() -> None:
    agreement = two_nodes()
    assert agreement.handle(OwnSealed(rank=0, version=at(1))) == []
    assert agreement.handle(OwnSealed(rank=1, version=at(1))) == []
    assert agreement.handle(ReplicaAcked(rank=0, node="b", version=at(1))) == []
    assert agreement.handle(ReplicaAcked(rank=1, node="b", version=at(1))) == []
    assert agreement.handle(ReplicaAcked(rank=1, node="c", version=at(1))) == [
        SendDone(to="b", generation=1, version=at(1))
    ]
    assert agreement.done == at(1) and agreement.committed is None


def test_committed_when_all_members_are_done() -> None:
    agreement = Agreement(node="a", generation=1, members=["a", "b"], targets={0: ["b"]})
    agreement.handle(OwnSealed(rank=0, version=at(1)))
    assert agreement.handle(PeerDone(node="b", generation=1, version=at(1))) == []
    assert agreement.handle(ReplicaAcked(rank=0, node="b", version=at(1))) == [
        SendDone(to="b", generation=1, version=at(1)),
        Commit(generation=1, version=at(1)),
    ]
    assert agreement.handle(PeerDone(node="b", generation=1, version=at(1))) == []  # said twice


def test_a_later_version_says_everything_that_an_earlier_one_would() -> None:
    agreement = Agreement(node="a", generation=1, members=["a", "b"], targets={0: ["b"]})
    agreement.handle(PeerDone(node="b", generation=1, version=at(5)))
    assert agreement.handle(PeerDone(node="b", generation=1, version=at(4))) == []
    agreement.handle(OwnSealed(rank=0, version=at(4)))
    assert Commit(generation=1, version=at(4)) in agreement.handle(ReplicaAcked(rank=0, node="b", version=at(4)))


def test_other_generations_and_strangers_have_no_effect_inv4() -> None:
    agreement = Agreement(node="a", generation=2, members=["a", "b"], targets={0: []})
    agreement.handle(OwnSealed(rank=0, version=at(1)))
    assert agreement.handle(PeerDone(node="b", generation=1, version=at(1))) == []
    assert agreement.handle(PeerDone(node="b", generation=3, version=at(1))) == []
    assert agreement.handle(PeerDone(node="x", generation=2, version=at(1))) == []
    assert agreement.handle(PeerConnected(node="x")) == []
    assert agreement.committed is None


def test_a_new_connection_hears_it_again() -> None:
    agreement = Agreement(node="a", generation=0, members=["a", "b"], targets={0: []})
    assert agreement.handle(PeerConnected(node="b")) == []
    agreement.handle(OwnSealed(rank=0, version=at(3)))
    assert agreement.handle(PeerConnected(node="b")) == [SendDone(to="b", generation=0, version=at(3))]


def test_alone_and_unprotected_a_seal_is_a_commit() -> None:
    agreement = Agreement(node="a", generation=0, members=["a"], targets={0: []})
    assert agreement.handle(OwnSealed(rank=0, version=at(0))) == [Commit(generation=0, version=at(0))]


def test_one_iteration_of_two_lineages_is_never_committed_inv1() -> None:
    agreement = Agreement(node="a", generation=2, members=["a", "b"], targets={0: []})
    agreement.handle(PeerDone(node="b", generation=2, version=at(5, 0)))
    with pytest.raises(InvariantError, match="INV-1"):
        agreement.handle(OwnSealed(rank=0, version=at(5, 1)))
    assert agreement.committed is None


def test_what_is_not_ours_is_a_bug() -> None:
    agreement = two_nodes()
    with pytest.raises(InvariantError):
        agreement.handle(OwnSealed(rank=9, version=at(1)))
    with pytest.raises(InvariantError):
        agreement.handle(ReplicaAcked(rank=0, node="c", version=at(1)))
    with pytest.raises(InvariantError):
        Agreement(node="z", generation=0, members=["a"], targets={0: []})
    with pytest.raises(InvariantError):
        Agreement(node="a", generation=0, members=["a"], targets={})


NODES = ("a", "b", "c")
RANKS = {"a": (0, 1), "b": (2,), "c": (3, 4)}
TARGETS = {0: ("b",), 1: ("c",), 2: ("c", "a"), 3: ("a",), 4: ()}
OWNER = {rank: node for node, ranks in RANKS.items() for rank in ranks}


class World(RuleBasedStateMachine):
    """Three nodes, five ranks. The model keeps every fact that ever was; the network keeps every message ever sent
    and delivers any of them at any time, any number of times, or never (a connection that broke)."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = {
            node: Agreement(
                node=node, generation=1, members=NODES, targets={rank: TARGETS[rank] for rank in RANKS[node]}
            )
            for node in NODES
        }
        self.sealed = dict.fromkeys(OWNER, -1)
        self.acked = {(rank, target): -1 for rank, targets in TARGETS.items() for target in targets}
        self.network: list[tuple[str, PeerDone]] = []
        self.committed = dict.fromkeys(NODES, -1)

    def everywhere(self) -> int:
        """The newest version that every slot and every replica has."""
        return min(*self.sealed.values(), *self.acked.values())

    def feed(self, node: str, event: OwnSealed | ReplicaAcked | PeerDone | PeerConnected) -> None:
        for effect in self.nodes[node].handle(event):
            match effect:
                case SendDone(to=to, generation=generation, version=version):
                    self.network.append((to, PeerDone(node=node, generation=generation, version=version)))
                case Commit(version=version):
                    assert version.v <= self.everywhere(), "committed what some slot or replica lacks"
                    assert version.v > self.committed[node], "committed backwards or twice"
                    self.committed[node] = version.v

    @rule(rank=st.sampled_from(sorted(OWNER)))
    def seal_next(self, rank: int) -> None:
        version = self.sealed[rank] + 1
        if version - 1 > self.everywhere():
            return  # the gate: nobody starts a step from a version that is not committed
        self.sealed[rank] = version
        self.feed(OWNER[rank], OwnSealed(rank=rank, version=at(version)))

    @rule(key=st.sampled_from([(rank, target) for rank, targets in TARGETS.items() for target in targets]))
    def acknowledge(self, key: tuple[int, str]) -> None:
        rank, target = key
        if self.sealed[rank] >= 0:
            self.acked[key] = self.sealed[rank]
            self.feed(OWNER[rank], ReplicaAcked(rank=rank, node=target, version=at(self.sealed[rank])))

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def deliver_any(self, data: st.DataObject) -> None:
        to, message = data.draw(st.sampled_from(self.network))
        self.feed(to, message)

    @rule(to=st.sampled_from(NODES), generation=st.sampled_from([0, 2]), v=st.integers(0, 9))
    def deliver_stale(self, to: str, generation: int, v: int) -> None:
        self.feed(to, PeerDone(node=next(n for n in NODES if n != to), generation=generation, version=at(v)))

    @rule()
    def heal(self) -> None:
        """All connections are new and nothing else is under way: then everybody knows what is true."""
        self.network.clear()
        for node in NODES:
            for peer in NODES:
                if peer != node:
                    self.feed(node, PeerConnected(node=peer))
        for to, message in list(self.network):
            self.feed(to, message)
        assert set(self.committed.values()) == {self.everywhere()}

    @invariant()
    def reported_as_decided(self) -> None:
        for node, agreement in self.nodes.items():
            assert agreement.committed == (at(self.committed[node]) if self.committed[node] >= 0 else None)


World.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestWorld = World.TestCase
