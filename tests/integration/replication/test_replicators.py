"""Real replicator processes over loopback: streams, commits, deaths, replacements, damage, strangers."""

import asyncio
import dataclasses
import importlib.util
import sys
import threading
from pathlib import Path

import pytest

from deadpool_ext.protocol.messages import NodeAddress
from deadpool_ext.protocol.types import Version
from deadpool_ext.replication import commands
from deadpool_ext.replication.arena import SLOTS, Segment, SlotState
from deadpool_ext.replication.errors import AuthenticationError, NotReadyError, ProtocolError, StaleGenerationError
from deadpool_ext.replication.transport import handshake, tcp
from deadpool_ext.replication.transport.handshake import Purpose

# The suite imports test files one by one; a helper beside them is loaded by its path.
_SPEC = importlib.util.spec_from_file_location("replication_cluster", Path(__file__).with_name("cluster.py"))
assert _SPEC is not None and _SPEC.loader is not None
harness = importlib.util.module_from_spec(_SPEC)
sys.modules["replication_cluster"] = harness
_SPEC.loader.exec_module(harness)
SECRET, SHARD_BYTES, cluster, is_right, proxy, seal, spec_of = (
    *(harness.SECRET, harness.SHARD_BYTES, harness.cluster, harness.is_right),
    *(harness.proxy, harness.seal, harness.spec_of),
)


def at(v: int, lineage: int = 0) -> Version:
    return Version(v=v, lineage=lineage)


def states(segment: Segment) -> list[SlotState]:
    return [segment.state(index) for index in range(SLOTS)]


def connect(address: NodeAddress, generation: int, secret: bytes = SECRET, to: str | None = None) -> None:
    """Try to open a stream; raises what a refusal raises."""

    async def attempt() -> None:
        greeting = handshake.hello(
            purpose=Purpose.STREAM, generation=generation, node="x", to=to or address.node, rank=0
        )
        (await tcp.connect(address, greeting, secret, 30)).close()

    asyncio.run(attempt())


def test_four_nodes_stream_and_commit_step_after_step() -> None:
    with cluster(4) as ring:
        ring.configure(0)
        for v in range(4):
            ring.seal_all(at(v))
            ring.expect_commit(0, at(v))
            for rank, node in enumerate(ring.seats):
                hosted = ring.seats[(rank + 1) % 4].hosted[rank]
                assert is_right(hosted, at(v))
                sealed = node.expect(commands.ReplicaSealed, lambda said, v=v: said.version.v == v)
                assert sealed.nbytes > SHARD_BYTES and sealed.seconds > 0
        assert [node.seen(commands.Problem) for node in ring.seats] == [[]] * 4


def test_nothing_is_committed_while_one_rank_lacks_a_replica() -> None:
    with cluster(3) as ring:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        for rank in (0, 1):
            seal(ring.seats[rank].own[rank], at(1))
        ring.seats[1].expect(commands.Hosted, lambda said: said.version == at(1))
        ring.seats[2].expect(commands.Hosted, lambda said: said.version == at(1))
        assert all(node.board.committed().version == at(0) for node in ring.seats)
        seal(ring.seats[2].own[2], at(1))
        ring.expect_commit(0, at(1))


def test_killed_mid_stream_and_replaced() -> None:
    """n1 dies with half of version 2 on the wire; n3 takes its seat from the replica that n2 hosts."""
    with cluster(3) as ring:
        fault = {"id": 7, "kind": "kill-node", "node": "n1", "rank": None, "step": 2, "phase": "h2h"}
        ring.configure(0, faults=(fault,))
        for v in (0, 1):
            ring.seal_all(at(v))
            ring.expect_commit(0, at(v))
        ring.seal_all(at(2))
        dead = ring.seats[1]
        assert dead.expect(commands.FaultPointReached).fault_id == 7
        for node in (ring.seats[0], ring.seats[2]):
            node.expect(commands.ReplicaSealed, lambda said: said.version == at(2))
        dead.kill()

        survivors = [ring.seats[0], ring.seats[2]]
        ring.fence(1, survivors)
        half = ring.seats[2].hosted[1]
        assert SlotState.WRITING not in states(half)
        assert half.newest().version == at(1) and is_right(half, at(1))  # the last good replica stays
        assert all(node.board.committed().version == at(1) for node in survivors)

        newcomer = ring.seats[1] = ring.add("n3")
        target = at(1)
        ring.configure(1, void_above=target)
        assert all(is_right(ring.seats[rank].own[rank], target) for rank in (0, 2))
        assert ring.seats[0].own[0].find(at(2)) is None  # void
        newcomer.send(
            commands.Fetch(
                generation=1,
                rank=1,
                version=target,
                source=ring.seats[2].address,
                segment_path=newcomer.own[1].path,
            )
        )
        done = newcomer.expect(commands.FetchDone)
        assert done.nbytes > SHARD_BYTES and done.version == target
        ring.expect_commit(1, target)  # needs the replica of rank 0, which the dead node had hosted, again
        assert is_right(newcomer.own[1], target) and is_right(newcomer.hosted[0], target)
        # n0 hosts rank 2's replica as before and n2 rank 1's: nothing is sent twice.
        resent = {
            (said.rank, said.nbytes > 0) for node in ring.seats for said in node.seen(commands.ReplicaSealed)
            if said.generation == 1
        }  # fmt: skip
        assert resent == {(0, True), (1, False), (2, False)}
        ring.seal_all(at(2, 1))
        ring.expect_commit(1, at(2, 1))
        assert all(is_right(ring.seats[(rank + 1) % 3].hosted[rank], at(2, 1)) for rank in range(3))


def test_a_second_configuration_of_the_same_nodes_needs_no_data() -> None:
    with cluster(2) as ring:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        ring.fence(1, ring.seats)
        ring.configure(1, void_above=at(0))
        ring.expect_commit(1, at(0))
        for node in ring.seats:
            assert [said.nbytes for said in node.seen(commands.ReplicaSealed) if said.generation == 1] == [0]


def test_f4_a_bit_flipped_on_the_wire_is_dropped_and_sent_again() -> None:
    flipped = []

    def flip_once(number: int, offset: int, data: bytearray) -> None:
        victim = 12 * 2**20  # within version 1: version 0 has about 9 MiB
        if not flipped and offset <= victim < offset + len(data):
            flipped.append(number)
            data[victim - offset] ^= 0x20

    with cluster(2) as ring, proxy(ring.seats[1].address, flip_once) as wire:
        ring.instead[("n0", "n1")] = wire.address
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        before = ring.seats[1].hosted[0].find(at(0))
        ring.seal_all(at(1))
        problem = ring.seats[1].expect(commands.Problem)
        assert problem.kind == "corrupt_transfer" and flipped
        assert ring.seats[1].hosted[0].find(at(0)) == before  # the last good replica stays
        ring.expect_commit(0, at(1))
        assert is_right(ring.seats[1].hosted[0], at(0)) and is_right(ring.seats[1].hosted[0], at(1))


def test_a_wire_that_always_flips_never_seals_anything() -> None:
    def flip(number: int, offset: int, data: bytearray) -> None:
        victim = 5 * 2**20
        if offset <= victim < offset + len(data):
            data[victim - offset] ^= 1

    with cluster(2) as ring, proxy(ring.seats[1].address, flip) as wire:
        ring.instead[("n0", "n1")] = wire.address
        ring.configure(0)
        ring.seal_all(at(0))
        ring.seats[1].expect(commands.Problem, lambda said: said.kind == "corrupt_transfer")
        ring.seats[0].expect(commands.Hosted)
        assert ring.seats[1].hosted[0].slots() == []
        assert ring.seats[0].board.committed() is None and ring.seats[1].board.committed() is None


def test_a_corrupt_own_slot_is_never_hosted() -> None:
    with cluster(2) as ring:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        ring.fence(1, ring.seats)
        own = ring.seats[0].own[0]
        own.flip_bit(seal(own, at(1)), 8 * SHARD_BYTES - 3)
        ring.configure(1)
        problem = ring.seats[0].expect(commands.Problem)
        assert (problem.kind, problem.rank, problem.version) == ("corrupt_slot", 0, at(1))
        assert own.find(at(1)) is None  # void: never used again
        assert [slot.version for slot in ring.seats[1].hosted[0].slots()] == [at(0)]


def test_a_corrupt_hosted_copy_is_not_fetched() -> None:
    with cluster(2) as ring:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        ring.fence(1, ring.seats)
        hosted = ring.seats[1].hosted[0]
        hosted.flip_bit(hosted.newest(), 4321)
        newcomer = ring.seats[0] = ring.add("n2")
        ring.configure(1, void_above=at(0))
        fetch = commands.Fetch(
            generation=1,
            rank=0,
            version=at(0),
            source=ring.seats[1].address,
            segment_path=newcomer.own[0].path,
        )
        newcomer.send(fetch)
        assert newcomer.expect(commands.FetchFailed).corrupt
        assert ring.seats[1].expect(commands.Problem).kind == "corrupt_slot"
        assert newcomer.own[0].slots() == [] and SlotState.WRITING not in states(newcomer.own[0])
        newcomer.send(fetch)  # what is void is not offered again
        failed = newcomer.expect(commands.FetchFailed)
        assert not failed.corrupt and "not_found" in failed.reason


def test_a_replica_that_went_bad_is_not_counted_on_in_the_next_generation() -> None:
    with cluster(2) as ring:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        ring.fence(1, ring.seats)
        hosted = ring.seats[1].hosted[0]
        hosted.flip_bit(hosted.newest(), 4321)
        ring.configure(1, void_above=at(0))
        problem = ring.seats[1].expect(commands.Problem)
        assert (problem.kind, problem.rank, problem.version) == ("corrupt_slot", 0, at(0))
        ring.expect_commit(1, at(0))
        assert is_right(hosted, at(0))  # it was sent again
        sealed = ring.seats[0].expect(commands.ReplicaSealed, lambda said: said.generation == 1)
        assert sealed.nbytes > SHARD_BYTES


def test_an_own_slot_that_is_written_again_is_committed_after_all() -> None:
    """What a worker does at the gate, where its live tensors still hold the version that was found corrupt."""
    with cluster(2) as ring:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        ring.seats[1].restart()  # and not configured yet, so that the flip comes before the stream
        own = ring.seats[0].own[0]
        own.flip_bit(seal(own, at(1)), 99)
        seal(ring.seats[1].own[1], at(1))
        ring.configure(0, only=[ring.seats[1]])
        assert ring.seats[0].expect(commands.Problem).kind == "corrupt_slot"
        assert own.find(at(1)) is None and ring.seats[0].board.committed().version == at(0)
        seal(own, at(1))
        ring.expect_commit(0, at(1))
        assert is_right(ring.seats[1].hosted[0], at(1))


def test_a_fetch_waits_for_a_source_that_is_not_there_yet_and_skips_what_is_here() -> None:
    with cluster(2) as ring:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        ring.fence(1, ring.seats)
        newcomer = ring.seats[0] = ring.add("n2")
        ring.configure(1, only=[newcomer])
        fetch = commands.Fetch(
            generation=1,
            rank=0,
            version=at(0),
            source=ring.seats[1].address,
            segment_path=newcomer.own[0].path,
        )
        newcomer.send(fetch)
        with pytest.raises(NotReadyError):
            connect(ring.seats[1].address, 1)
        ring.configure(1, only=[ring.seats[1]])
        assert newcomer.expect(commands.FetchDone).nbytes > SHARD_BYTES
        newcomer.send(fetch)
        assert newcomer.expect(commands.FetchDone).nbytes == 0
        ring.expect_commit(1, at(0))


def test_a_freeze_ends_a_fetch_half_way_and_gives_its_slot_back() -> None:
    half_way, go_on = threading.Event(), threading.Event()

    def stall(number: int, offset: int, data: bytearray) -> None:
        if offset > 5 * 2**20:
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
        assert SlotState.WRITING in states(newcomer.own[0])
        ring.fence(2, ring.seats)
        assert SlotState.WRITING not in states(newcomer.own[0])
        go_on.set()
        ring.configure(2, void_above=at(0))
        newcomer.send(dataclasses.replace(fetch, generation=2, source=ring.seats[1].address))
        assert newcomer.expect(commands.FetchDone).generation == 2
        ring.expect_commit(2, at(0))
        assert is_right(newcomer.own[0], at(0))


def test_generation_after_generation_nothing_accumulates() -> None:
    def held(pid: int) -> tuple[int, int]:
        maps = Path(f"/proc/{pid}/maps").read_text()
        return len(list(Path(f"/proc/{pid}/fd").iterdir())), maps.count("deadpool-")

    with cluster(2, shard_bytes=5000) as ring:
        counts = []
        for generation in range(25):
            ring.configure(generation)
            ring.seal_all(at(generation, generation))
            ring.expect_commit(generation, at(generation, generation))
            ring.fence(generation + 1, ring.seats)
            counts.append([held(node.pid) for node in ring.seats])
        assert counts[-1] == counts[2], counts


def test_strangers_are_refused_in_both_directions() -> None:
    with cluster(2) as ring:
        stranger = ring.add("s", b"another job's secret")
        ring.configure(0)
        with pytest.raises(AuthenticationError):
            connect(ring.seats[0].address, 0, b"a guess")
        with pytest.raises(ProtocolError, match="not n9"):
            connect(ring.seats[0].address, 0, to="n9")
        # A whole replicator with the wrong secret gets nowhere, as a client or as a target.
        ring.seats[1] = stranger
        ring.configure(1)
        ring.seal_all(at(0))
        for node in (ring.seats[0], stranger):
            node.expect(commands.Problem, lambda said: said.kind == "authentication")
        assert ring.seats[0].hosted[1].slots() == [] and stranger.hosted[0].slots() == []
        assert ring.seats[0].board.committed() is None


def test_older_generations_are_refused_inv4() -> None:
    with cluster(2) as ring:
        ring.configure(3)
        connect(ring.seats[0].address, 3)
        with pytest.raises(StaleGenerationError):
            connect(ring.seats[0].address, 2)
        with pytest.raises(NotReadyError):
            connect(ring.seats[0].address, 4)
        ring.fence(5, [ring.seats[0]])
        with pytest.raises(StaleGenerationError):
            connect(ring.seats[0].address, 3)
        # Commands of older generations have no effect and no answer.
        ring.seats[0].send(commands.Freeze(generation=4))
        ring.configure(6, only=[ring.seats[0]])
        assert [said.generation for said in ring.seats[0].seen(commands.Frozen)] == [5]


def test_after_frozen_nothing_is_written_and_no_commit_appears() -> None:
    with cluster(2) as ring:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        ring.fence(1, [ring.seats[1]])
        hosted = ring.seats[1].hosted[0]
        changes = hosted.changes()
        ring.seal_all(at(1))
        # n0 finds its stream closed and the peer in a newer generation, and cannot get on.
        problem = ring.seats[0].expect(commands.Problem, lambda said: said.kind == "stale")
        assert problem.peer == "n1"
        assert hosted.changes() == changes
        assert ring.seats[0].board.committed().version == at(0)


def test_broken_connections_come_back() -> None:
    with cluster(3, shard_bytes=100_000) as ring:
        ring.configure(0)
        for v in range(6):
            ring.seal_all(at(v))
            for node in ring.seats:
                node.send(commands.DropConnections(generation=0))
            ring.expect_commit(0, at(v))


def test_a_peer_that_takes_nothing_is_reported() -> None:
    with cluster(2) as ring, proxy(ring.seats[1].address) as wire:
        ring.instead[("n0", "n1")] = wire.address
        ring.configure(0, no_progress_s=0.5)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        wire.silent.set()
        ring.seal_all(at(1))
        problem = ring.seats[0].expect(commands.Problem, lambda said: said.kind == "no_progress")
        assert (problem.peer, problem.rank) == ("n1", 0)


def test_another_layout_is_refused() -> None:
    with cluster(2, shard_bytes=1000) as ring:
        ring.configure(0, only=[ring.seats[0]])
        ring.shard_bytes = 1001
        ring.configure(0, only=[ring.seats[1]])
        seal(ring.seats[0].own[0], at(0))
        assert ring.seats[0].expect(commands.Problem).kind == "refused"
        assert ring.seats[1].expect(commands.Problem).kind == "layout"
        assert ring.seats[1].hosted[0].slots() == []


def test_a_configuration_that_does_not_fit_is_reported() -> None:
    with cluster(2, shard_bytes=1000) as ring:
        ring.configure(0)
        node = ring.seats[0]
        node.send(
            commands.Configure(
                generation=1,
                specs=(spec_of(0, 999),),
                own={0: node.own[0].path},
                hosted={},
                targets={},
                members=(node.address,),
                board_path=node.board.path,
            )
        )
        assert node.expect(commands.Problem).kind == "configure"


def test_the_process_ends_with_its_agent_and_on_stop() -> None:
    with cluster(2, shard_bytes=1000) as ring:
        ring.configure(0)
        ring.seal_all(at(0))
        ring.expect_commit(0, at(0))
        assert ring.seats[0].hang_up() == 0
        ring.seats[1].send(commands.Stop())
        assert ring.seats[1].wait() == 0
