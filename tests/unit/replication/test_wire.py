"""What goes over sockets: command frames, frame headers, the handshake."""

import asyncio
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_ext.protocol.messages import NodeAddress
from deadpool_ext.protocol.types import ShardSpec, Version
from deadpool_ext.replication import commands
from deadpool_ext.replication.errors import (
    AuthenticationError,
    CorruptTransferError,
    NotReadyError,
    ProtocolError,
    StaleGenerationError,
)
from deadpool_ext.replication.transport import frame, handshake
from deadpool_ext.replication.transport.frame import CHUNK_BYTES, FrameKind, Header
from deadpool_ext.replication.transport.handshake import Answered, Purpose, Verdict

CONFIGURE = commands.Configure(
    generation=3,
    specs=(ShardSpec(rank=0, shard_bytes=10, meta_capacity=5, layout_digest="ab"),),
    own={0: "/proc/1/fd/5"},
    hosted={7: "/proc/1/fd/6"},
    targets={0: (NodeAddress(node="b", host="::1", port=1),)},
    members=(NodeAddress(node="a", host="h", port=2),),
    board_path="/proc/1/fd/4",
    void_above=Version(v=4, lineage=1),
    faults=({"id": 1, "phase": "h2h", "step": 4, "rank": None},),
)


def test_commands_survive_the_wire() -> None:
    async def through() -> list[commands.Message | None]:
        reader = asyncio.StreamReader()
        problem = commands.Problem(kind="x", text="y", generation=1, version=Version(v=1, lineage=0))
        for message in (CONFIGURE, commands.Stop(), problem):
            reader.feed_data(commands.encode(message))
        reader.feed_data(b"\x09\x00\x00\x00abc")  # cut off
        reader.feed_eof()
        return [await commands.read_message(reader) for _ in range(4)]

    got = asyncio.run(through())
    assert got[0] == CONFIGURE and got[1] == commands.Stop() and got[3] is None
    assert isinstance(got[2], commands.Problem)


def test_every_message_type_is_known_to_the_codec() -> None:
    kinds = {*get_args(commands.Command), *get_args(commands.Reply)}
    assert {kind.__name__ for kind in kinds} == set(commands._TYPES)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x82\xa4name\xa1X\xa4body\x80", b"\x81\xa4name\xa6Freeze"])
def test_a_malformed_command_is_a_typed_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        commands.decode(body)


HEADERS = st.builds(
    Header,
    kind=st.sampled_from(FrameKind),
    generation=st.integers(0, 2**64 - 1),
    rank=st.integers(0, 2**32 - 1),
    version=st.builds(Version, v=st.integers(0, 2**64 - 1), lineage=st.integers(0, 2**64 - 1)),
    layout_digest=st.text("0123456789abcdef", max_size=16),
    offset=st.integers(0, 2**64 - 1),
    nbytes=st.integers(0, CHUNK_BYTES),
    crc=st.integers(0, 2**32 - 1),
    aux=st.integers(0, 2**32 - 1),
)


@given(HEADERS)
def test_headers_survive_the_wire(header: Header) -> None:
    raw = frame.pack(header)
    assert len(raw) == frame.HEADER_BYTES and frame.unpack(raw) == header


@given(HEADERS, st.integers(0, frame.HEADER_BYTES * 8 - 1))
def test_no_flipped_bit_of_a_header_goes_unnoticed(header: Header, bit: int) -> None:
    raw = bytearray(frame.pack(header))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptTransferError):
        frame.unpack(raw)


def test_a_payload_beyond_a_chunk_is_refused() -> None:
    header = Header(
        kind=FrameKind.CHUNK, generation=0, rank=0, version=Version(v=0, lineage=0), layout_digest="", nbytes=2**40
    )
    with pytest.raises(ProtocolError):
        frame.unpack(frame.pack(header))
    assert frame.unpack(frame.pack(replace(header, kind=FrameKind.OFFER))).payload_bytes == 0


SECRET = b"the job's secret"
HELLO = handshake.hello(purpose=Purpose.STREAM, generation=4, node="a", to="b", rank=3)


def test_both_sides_that_know_the_secret_agree() -> None:
    raw = handshake.encode(HELLO)
    given_challenge = handshake.challenge(SECRET, raw)
    handshake.check_answer(SECRET, raw, given_challenge, handshake.answer(SECRET, raw, given_challenge))
    assert handshake.decode(raw, handshake.Hello) == HELLO


def test_a_server_without_the_secret_gets_no_proof() -> None:
    raw = handshake.encode(HELLO)
    with pytest.raises(AuthenticationError):
        handshake.answer(SECRET, raw, handshake.challenge(b"a guess", raw))


def test_a_client_cannot_replay_or_mirror_a_proof() -> None:
    raw = handshake.encode(HELLO)
    first, second = handshake.challenge(SECRET, raw), handshake.challenge(SECRET, raw)
    old = handshake.answer(SECRET, raw, first)
    mirrored = handshake.Answer(proof=second.proof)
    other = handshake.encode(replace(HELLO, generation=5))
    for answer, greeting in ((old, raw), (mirrored, raw), (handshake.answer(SECRET, raw, second), other)):
        with pytest.raises(AuthenticationError):
            handshake.check_answer(SECRET, greeting, second, answer)


def test_another_protocol_or_garbage_is_not_a_hello() -> None:
    for raw in (b"GET / HTTP/1.1", handshake.encode(replace(HELLO, protocol="other/9")), b""):
        with pytest.raises(AuthenticationError):
            handshake.decode(raw, handshake.Hello)


def test_verdicts_become_errors() -> None:
    handshake.check_verdict(Verdict(answer=Answered.OK, generation=4), HELLO)
    for answer, error in (
        (Answered.STALE, StaleGenerationError),
        (Answered.NOT_READY, NotReadyError),
        (Answered.REFUSED, ProtocolError),
    ):
        with pytest.raises(error):
            handshake.check_verdict(Verdict(answer=answer, generation=9), HELLO)
