"""Frames, the handshake, and everything that must be refused."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from deadpool_ext.control.wire import (
    AuthenticationError,
    BlockingConnection,
    Channel,
    Connection,
    ConnectionLostError,
    FrameError,
    Handshake,
    decode_message,
    encode_message,
    new_secret,
)
from deadpool_ext.protocol.messages import Emit, Fence, Heartbeat, NodeAddress, Recover, Replicate
from deadpool_ext.protocol.types import RecoveryPlan, SeatPlan, ShardSpec, SourceKind, Version

FENCE = Fence(generation=3, reason="node n1 lost", lost_nodes=("n1",))


def pair(secret_a: bytes, secret_b: bytes) -> tuple[Channel, Channel]:
    client, server = Handshake(secret_a, client=True), Handshake(secret_b, client=False)
    reply = server.feed(client.opening())
    server.feed(client.feed(reply))
    assert client.channel is not None and server.channel is not None
    return client.channel, server.channel


def test_nested_messages_round_trip() -> None:
    spec = ShardSpec(rank=0, shard_bytes=12, meta_capacity=4, layout_digest="0" * 16)
    seat = SeatPlan(rank=0, node="n4", new_worker=True, source=SourceKind.REPLICA, source_node="n2")
    message = Recover(
        plan=RecoveryPlan(generation=1, target=Version(v=7, lineage=0), seats=(seat,), reason="n1 lost"),
        replicate=Replicate(
            generation=1,
            specs=(spec,),
            seat_nodes=("n4",),
            replica_of=((1,),),
            addresses=(NodeAddress(node="n4", host="127.0.0.1", port=1),),
        ),
    )
    assert decode_message(encode_message(message)) == message


def test_event_fields_keep_their_types() -> None:
    fields: dict[str, Any] = {"loss": float.fromhex("0x1.8p1"), "n": 3, "ok": True, "names": ["a"], "none": None}
    message = Emit(event="step", generation=0, node="n0", rank=None, fields=fields)
    assert decode_message(encode_message(message)).fields == fields


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x92\xa4Nope\x80", b"\x92\xa5Fence\x80", b"\x91\xa5Fence"])
def test_garbage_is_a_frame_error(body: bytes) -> None:
    with pytest.raises(FrameError):
        decode_message(body)


def test_foreign_objects_are_not_sent() -> None:
    with pytest.raises(FrameError):
        encode_message({"not": "a message"})


def test_frames_survive_any_fragmentation() -> None:
    client, server = pair(b"s", b"s")
    stream = client.pack(FENCE) + client.pack(Heartbeat(node="n0"))
    received = [message for byte in stream for message in server.feed(bytes([byte]))]
    assert received == [FENCE, Heartbeat(node="n0")]


def test_every_altered_byte_is_refused() -> None:
    for position in range(4, len(pair(b"s", b"s")[0].pack(FENCE))):
        client, server = pair(b"s", b"s")
        frame = bytearray(client.pack(FENCE))
        frame[position] ^= 1
        with pytest.raises(AuthenticationError):
            server.feed(bytes(frame))


def test_replay_reorder_and_reflection_are_refused() -> None:
    client, server = pair(b"s", b"s")
    frame = client.pack(FENCE)
    assert server.feed(frame) == [FENCE]
    with pytest.raises(AuthenticationError):
        server.feed(frame)

    client, server = pair(b"s", b"s")
    client.pack(FENCE)
    with pytest.raises(AuthenticationError):
        server.feed(client.pack(FENCE))  # the second frame first

    client, server = pair(b"s", b"s")
    with pytest.raises(AuthenticationError):
        client.feed(client.pack(FENCE))  # sent back to its sender


def test_a_frame_of_another_connection_is_refused() -> None:
    old_client, _ = pair(b"s", b"s")
    _, server = pair(b"s", b"s")
    with pytest.raises(AuthenticationError):
        server.feed(old_client.pack(FENCE))


def test_oversized_frames_are_refused_on_both_sides() -> None:
    small = Channel(b"a", b"b", max_frame_bytes=64)
    with pytest.raises(FrameError):
        small.pack(Emit(event="x" * 100, generation=0, node="", rank=None, fields={}))
    with pytest.raises(FrameError):
        small.feed(b"\xff\xff\xff\xff")


@pytest.mark.parametrize("client_is_wrong", [True, False])
def test_a_wrong_secret_is_refused_by_either_side(client_is_wrong: bool) -> None:
    client, server = Handshake(b"right", client=True), Handshake(b"wrong", client=False)
    with pytest.raises(AuthenticationError):
        client.feed(server.feed(client.opening()))
    if client_is_wrong:  # a client that skips the check still cannot prove itself
        forged = Handshake(b"wrong", client=False)
        forged.feed(client.opening())
        with pytest.raises(AuthenticationError):
            forged.feed(b"\x00" * 32)


def test_a_reflected_hello_is_refused() -> None:
    client = Handshake(b"s", client=True)
    with pytest.raises(AuthenticationError):
        client.feed(client.opening() + b"\x00" * 32)


def test_another_protocol_is_refused_at_once() -> None:
    with pytest.raises(AuthenticationError):
        Handshake(b"s", client=False).feed(b"GET / HTTP/1.1\r\n")


def test_asyncio_and_blocking_sides_understand_each_other() -> None:
    asyncio.run(_both_sides())


async def _both_sides() -> None:
    secret = new_secret()
    answers: list[Any] = []

    def client(port: int) -> None:
        connection = BlockingConnection.open(socket.create_connection(("127.0.0.1", port)), secret, client=True)
        connection.send(FENCE)
        answers.append(connection.receive())
        with pytest.raises(ConnectionLostError):
            connection.receive()
        connection.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = await Connection.open(reader, writer, secret, client=False)
        answers.append(await connection.receive())
        connection.send(Heartbeat(node="n1"))
        await connection.drain()
        connection.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        thread = threading.Thread(target=client, args=(server.sockets[0].getsockname()[1],))
        thread.start()
        await asyncio.wait_for(asyncio.to_thread(thread.join), 10)
    assert answers == [FENCE, Heartbeat(node="n1")]


def test_a_silent_peer_is_given_up_on() -> None:
    asyncio.run(_silent_peer())


async def _silent_peer() -> None:
    left, right = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=left)
    with pytest.raises(ConnectionLostError):
        await Connection.open(reader, writer, b"s", client=False, deadline_s=0.05)
    right.close()
