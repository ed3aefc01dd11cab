"""A replicator is killed at any moment and another one takes its place: nothing is lost, nothing is sent twice."""

import importlib.util
import sys
import threading
import time
from pathlib import Path

import pytest

from deadpool_ext.protocol.types import Version
from deadpool_ext.replication import commands
from deadpool_ext.replication.arena import SLOTS, Segment, SlotState

# The suite imports test files one by one; a helper beside them is loaded by its path.
_SPEC = importlib.util.spec_from_file_location("replication_cluster", Path(__file__).with_name("cluster.py"))
assert _SPEC is not None and _SPEC.loader is not None
harness = importlib.util.module_from_spec(_SPEC)
sys.modules["replication_cluster"] = harness
_SPEC.loader.exec_module(harness)
cluster, is_right, proxy = harness.cluster, harness.is_right, harness.proxy


def at(v: int, lineage: int = 0) -> Version:
    return Version(v=v, lineage=lineage)


def states(segment: Segment) -> list[SlotState]:
    return [segment.state(index) for index in range(SLOTS)]


def test_killed_while_idle_it_learns_again_what_was_agreed() -> None:
    with cluster(3) as ring:
        ring.configure(0)
        for v in (0, 1):
            ring.seal_all(at(v))
            ring.expect_commit(0, at(v))
        dead = ring.seats[1]
        port = dead.address.port
        dead.restart()
        ring.configure(0, only=[dead])
        assert dead.address.port == port
        # The word of the last commit is said again, in case it died with its predecessor.
        dead.expect(commands.CommittedSeen, lambda said: said.version == at(1))
        assert dead.expect(commands.ReplicaSealed, lambda said: said.version == at(1) and said.nbytes == 0)
        ring.seal_all(at(2))
        ring.expect_commit(0, at(2))
        assert all(is_right(ring.seats[(rank + 1) % 3].hosted[rank], at(2)) for rank in range(3))


def test_killed_before_it_said_that_the_version_is_committed() -> None:
    """Its peers had told it that they are done; that is lost, and said again on new connections."""
    with cluster(2) as ring:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        harness.seal(ring.seats[0].own[0], at(1))
        ring.seats[1].expect(commands.Hosted, lambda said: said.version == at(1))
        ring.seats[1].restart()
        harness.seal(ring.seats[1].own[1], at(1))  # the worker goes on meanwhile
        ring.configure(0, only=[ring.seats[1]])
        ring.expect_commit(0, at(1))


@pytest.mark.parametrize("victim", [0, 1], ids=["sender", "receiver"])
def test_killed_in_the_middle_of_a_stream(victim: int) -> None:
    half_way, go_on = threading.Event(), threading.Event()

    def stall(number: int, offset: int, data: bytearray) -> None:
        if offset > 12 * 2**20 and not half_way.is_set():  # within version 1: version 0 has about 9 MiB
            half_way.set()
            assert go_on.wait(harness.DEADLINE_S)

    with cluster(2) as ring, proxy(ring.seats[1].address, stall) as wire:
        ring.instead[("n0", "n1")] = wire.address
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        ring.seal_all(at(1))
        assert half_way.wait(harness.DEADLINE_S)
        hosted = ring.seats[1].hosted[0]
        # What the proxy has passed on may still be in the receiver's socket, while somebody else has the processor.
        end = time.monotonic() + harness.DEADLINE_S
        while SlotState.WRITING not in states(hosted):
            assert time.monotonic() < end
            time.sleep(0.001)
        ring.seats[victim].restart()
        if victim == 1:
            assert SlotState.WRITING not in states(hosted)
        assert is_right(hosted, at(0))  # the last good replica stays
        go_on.set()
        ring.configure(0, only=[ring.seats[victim]])
        ring.expect_commit(0, at(1))
        assert is_right(hosted, at(1)) and is_right(ring.seats[0].hosted[1], at(1))


@pytest.mark.parametrize("victim", ["source", "fetcher"])
def test_killed_in_the_middle_of_a_fetch(victim: str) -> None:
    half_way, go_on = threading.Event(), threading.Event()

    def stall(number: int, offset: int, data: bytearray) -> None:
        if offset > 5 * 2**20 and not half_way.is_set():
            half_way.set()
            assert go_on.wait(harness.DEADLINE_S)

    with cluster(2) as ring, proxy(ring.seats[1].address, stall, back=True) as wire:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        ring.fence(1, ring.seats)
        newcomer = ring.seats[0] = ring.add("n2")
        ring.configure(1, void_above=at(0))
        fetch = commands.Fetch(
            generation=1, rank=0, version=at(0), source=wire.address, segment_path=newcomer.own[0].path
        )
        newcomer.send(fetch)
        assert half_way.wait(harness.DEADLINE_S)
        dead = ring.seats[1] if victim == "source" else newcomer
        dead.restart()
        go_on.set()
        ring.configure(1, only=[dead])
        if dead is newcomer:
            newcomer.send(fetch)  # a standing order: nobody answered it
        assert newcomer.expect(commands.FetchDone).nbytes > harness.SHARD_BYTES
        assert is_right(newcomer.own[0], at(0))
        ring.expect_commit(1, at(0))


def test_killed_during_a_fence_its_successor_is_frozen() -> None:
    with cluster(2) as ring:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        dead = ring.seats[0]
        dead.board.fence(1)
        dead.restart()
        dead.send(commands.Freeze(generation=1))
        dead.expect(commands.Frozen, lambda said: said.generation == 1)
        ring.fence(1, [ring.seats[1]])
        ring.configure(1, void_above=at(0))
        ring.expect_commit(1, at(0))
        ring.seal_all(at(1, 1))
        ring.expect_commit(1, at(1, 1))
