"""A fence and an abort wake whoever is blocked on a dead or stopped peer, and touch nobody else's sockets."""

from __future__ import annotations

import functools
import json
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool_ext.comm.errors import COMMUNICATION_ERRORS, ConnectTimeoutError, FencedError
from deadpool_ext.comm.pulse import Pulse
from deadpool_ext.comm.registry import Communicators
from deadpool_ext.comm.torch_patch import patch_torch

WORLD = [0, 1, 2]
LARGE = 1 << 20  # elements: more than the sockets' buffers hold


def block(kind: str, rank: int, tensor: torch.Tensor) -> None:
    """Something that cannot end without rank 2."""
    match kind:
        case "recv":
            dist.recv(tensor, 2)
        case "isend":
            work = dist.isend(tensor, 2)
            assert work is not None
            work.wait()
        case "all_reduce":
            dist.all_reduce(tensor)
        case "reduce_scatter":
            dist.reduce_scatter_tensor(torch.empty(LARGE // 4), tensor[: LARGE // 4 * 3])
        case "pair":
            # Rank 1 waits for rank 2, rank 0 for rank 1: no peer of rank 0 is gone.
            dist.recv(tensor, rank + 1)
        case _:
            raise AssertionError(kind)


def blocked_rank(rank: int, link: Any, *, kind: str, killed: bool, session: tuple[str, int]) -> dict[str, Any]:
    with socket.create_connection(session) as talk:
        pulse = Pulse.create()
        communicators = Communicators(rank=rank, world_size=len(WORLD), pulse=pulse)
        patch_torch(communicators)
        link.connect(communicators, 0, hosts=rank == 0)
        dist.init_process_group("gloo")
        tensor = torch.full((LARGE,), float(rank))
        dist.all_reduce(torch.ones(1))
        if rank == 2:
            link.send("ready")
            link.expect("never")
        report: dict[str, Any] = {}

        def control() -> None:
            link.expect("fence")
            report["shown"] = shown(pulse, killed=killed)
            communicators.fence(1)
            report["abort"] = communicators.abort(30.0)

        thread = threading.Thread(target=control)
        thread.start()
        link.send("ready")
        with pytest.raises(COMMUNICATION_ERRORS) as raised:
            block(kind, rank, tensor)
        report["error"] = str(raised.value)
        thread.join(60)
        report["shown afterwards"] = pulse.read().blocked
        with pytest.raises(dist.DistBackendError, match="generation 0 is over"):
            dist.all_reduce(tensor)
        report["again"] = communicators.abort()  # nothing is left to do
        report["pending"] = communicators.counts()["0"].waiting
        # The store's client of that generation, and a socket that has nothing to do with it, live on.
        store = communicators._connection._store
        store.set(f"alive/{rank}", "yes")
        report["store"] = store.get(f"alive/{rank}")
        talk.sendall(b"ping")
        report["session"] = talk.recv(4)
        return report


def shown(pulse: Pulse, *, killed: bool) -> list[tuple[str, int, int | None]]:
    """Operation, number and peer of what this process is blocked in, seen from outside as soon as it is."""
    seen = Pulse.open(pulse.path)
    end = time.monotonic() + (0.5 if killed else 30)
    while not (blocked := seen.read().blocked) and time.monotonic() < end:
        time.sleep(0.001)
    assert all(one.group == "0" and one.ranks == tuple(WORLD) and 0 <= one.seconds < 60 for one in blocked)
    return [(one.operation, one.number, one.peer) for one in blocked]


# What each rank is blocked in; the first collective is over.
BLOCKED = {
    "recv": lambda rank: ("recv", 0, 2),
    "isend": lambda rank: ("send", 0, 2),
    "all_reduce": lambda rank: ("allreduce", 2, None),
    "reduce_scatter": lambda rank: ("reduce_scatter_base", 2, None),
    "pair": lambda rank: ("recv", 0, rank + 1),
}


def serve_echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(16):
            connection.sendall(data)


@pytest.mark.parametrize("strike", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("kind", ["recv", "isend", "all_reduce", "reduce_scatter", "pair"])
def test_everybody_blocked_wakes_and_other_sockets_live_on(ranks: Any, kind: str, strike: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        session = listener.getsockname()
        ranks.start(WORLD, functools.partial(blocked_rank, kind=kind, killed=strike is signal.SIGKILL, session=session))
        ranks.relay_port(0, WORLD)
        ranks.expect(WORLD, "ready")
        for _ in WORLD:  # they have all connected
            threading.Thread(target=serve_echo, args=(listener.accept()[0],), daemon=True).start()
        ranks.strike(2, strike)
        ranks.tell([0, 1], "fence")
        for rank, report in enumerate(ranks.results([0, 1])):
            # (Who lost a peer by its death may have found out already.)
            assert report["shown"] in ([BLOCKED[kind](rank)], [] if strike is signal.SIGKILL else None)
            assert report["shown afterwards"] == ()
            assert report["abort"].complete, report
            assert report["again"].sockets == 0
            assert report["pending"] == 0
            assert report["store"] == b"yes"
            assert report["session"] == b"ping"
            assert "generation 0" in report["error"]


def in_flight(rank: int, link: Any) -> bool:
    """An operation nobody waits for must have ended, and left the tensor alone, when the abort is complete."""
    communicators = Communicators(rank=rank, world_size=2)
    patch_torch(communicators)
    link.connect(communicators, 0, hosts=rank == 0)
    dist.init_process_group("gloo")
    dist.barrier()
    link.send("ready")
    if rank == 1:
        link.expect("never")
    link.expect("go")
    tensor = torch.ones(LARGE)
    work = dist.all_reduce(tensor, async_op=True)
    assert communicators.counts()["0"].issued == communicators.counts()["0"].completed + 1
    communicators.fence(1)
    report = communicators.abort(60.0)
    counts = communicators.counts()["0"]
    assert report.complete
    assert counts.issued == counts.completed
    assert work is not None
    assert work.is_completed()
    with pytest.raises(dist.DistBackendError, match="ended by a fence"):
        work.wait()
    return True


def test_complete_abort_means_that_no_operation_runs(ranks: Any) -> None:
    ranks.start([0, 1], in_flight)
    ranks.relay_port(0, [0, 1])
    ranks.expect([0, 1], "ready")
    ranks.strike(1, signal.SIGSTOP)
    ranks.tell([0], "go")
    assert ranks.results([0]) == [True]


def test_abort_spares_a_generation_that_is_not_fenced(ranks: Any) -> None:
    def body(rank: int, link: Any) -> int:
        communicators = Communicators(rank=rank, world_size=2)
        patch_torch(communicators)
        link.connect(communicators, 4, hosts=rank == 0)
        dist.init_process_group("gloo")
        for generation in (3, 4):  # late news of generations that are not newer
            communicators.fence(generation)
            assert communicators.abort().detail == "nothing to abort"
            assert not communicators.fenced
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return int(tensor.item())

    ranks.start([0, 1], body)
    ranks.relay_port(0, [0, 1])
    assert ranks.results([0, 1]) == [2, 2]


@pytest.mark.parametrize("absent", ["store", "group"])
def test_a_fence_interrupts_a_connect_to_an_absent_peer(ranks: Any, absent: str) -> None:
    def body(rank: int, link: Any) -> str:
        communicators = Communicators(rank=rank, world_size=2)
        patch_torch(communicators)
        communicators.solo(0)
        dist.init_process_group("gloo")
        port = communicators.open_store("127.0.0.1")[1]
        threading.Thread(target=lambda: (link.expect("fence"), communicators.fence(2)), daemon=True).start()
        if absent == "group":
            # The peer seems to be there, but never connects: gloo waits where nothing can wake it.
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            digest = communicators._groups["0"].spec.digest
            store.set("g1/rank/1", json.dumps({"listening": [], "groups": {"0": digest}}))
        link.send("connecting")
        with pytest.raises(FencedError):
            communicators.connect(1, "127.0.0.1", port, 60.0)
        with pytest.raises(FencedError):
            communicators.connect(1, "127.0.0.1", port, 60.0)  # that generation is over
        return communicators.mode.value

    ranks.start([0], body)
    ranks.expect([0], "connecting")
    ranks.tell([0], "fence")
    assert ranks.results([0]) == ["solo"]


def test_a_connect_that_takes_too_long_names_the_absent(ranks: Any) -> None:
    def body(rank: int, link: Any) -> str:
        communicators = Communicators(rank=rank, world_size=3)
        patch_torch(communicators)
        communicators.solo(0)
        dist.init_process_group("gloo")
        port = communicators.open_store("127.0.0.1")[1]
        with pytest.raises(ConnectTimeoutError) as raised:
            communicators.connect(1, "127.0.0.1", port, 0.5)
        return str(raised.value)

    ranks.start([1], body)
    [message] = ranks.results([1])
    assert "ranks 0, 2" in message
