"""TCP channels between replicators: frames in and out of shared memory without a copy in between.

Runs in the event loop of one process. Every wait inside a transfer is bounded by ``no_progress_s``; only waiting for
the first byte of the next frame on an idle connection is not (TCP keepalive bounds that).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

from deadpool_ext.protocol.messages import NodeAddress
from deadpool_ext.replication.errors import NoProgressError, ProtocolError
from deadpool_ext.replication.transport import frame, handshake
from deadpool_ext.replication.transport.frame import Header

HANDSHAKE_S = 5.0
_LENGTH = struct.Struct("<H")


def listen(host: str) -> socket.socket:
    """A non-blocking listening socket on a free port of ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family, backlog=256)
    server.setblocking(False)
    return server


class Channel:
    """One connection. One task reads and one (perhaps the same) writes at a time."""

    def __init__(self, sock: socket.socket, no_progress_s: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.allow(no_progress_s)

    def allow(self, no_progress_s: float) -> None:
        """Set the bound on every wait inside a transfer; the kernel gives unacknowledged bytes the same time."""
        self._no_progress_s = no_progress_s
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(no_progress_s * 1000)))

    async def send(self, header: Header, payload: memoryview | None = None) -> None:
        """Send one frame. Raises :class:`NoProgressError`, ``OSError``."""
        try:
            async with asyncio.timeout(self._no_progress_s):
                await self._loop.sock_sendall(self._sock, frame.pack(header))
                if payload is not None:
                    await self._loop.sock_sendall(self._sock, payload)
        except TimeoutError as error:
            raise NoProgressError(f"{header.kind.name} not taken within {self._no_progress_s} s") from error

    async def receive(self, *, idle: bool = False) -> Header:
        """The next header; its payload, if it has one, must be read next. ``idle``: wait for its beginning forever.

        Raises :class:`NoProgressError`, ``ConnectionResetError`` at the end of the stream, and what
        :func:`frame.unpack` raises.
        """
        raw = bytearray(frame.HEADER_BYTES)
        view = memoryview(raw)
        if idle:
            got = await self._some(view)
            view = view[got:]
        await self.receive_into(view)
        return frame.unpack(raw)

    async def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with what comes next."""
        try:
            async with asyncio.timeout(self._no_progress_s):
                while view:
                    view = view[await self._some(view) :]
        except TimeoutError as error:
            raise NoProgressError(f"nothing came for {self._no_progress_s} s") from error

    async def send_small(self, raw: bytes) -> None:
        """A short length-prefixed message of the handshake."""
        await self._loop.sock_sendall(self._sock, _LENGTH.pack(len(raw)) + raw)

    async def receive_small(self) -> bytes:
        """Inverse of :meth:`send_small`."""
        raw = bytearray(_LENGTH.size)
        await self.receive_into(memoryview(raw))
        (length,) = _LENGTH.unpack(raw)
        if length > handshake.MAX_BYTES:
            raise ProtocolError(f"a handshake message of {length} bytes")
        body = bytearray(length)
        await self.receive_into(memoryview(body))
        return bytes(body)

    def break_off(self) -> None:
        """End the connection from another task: whoever waits on it gets an error."""
        with contextlib.suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only when no task waits on it any more."""
        self._sock.close()

    async def _some(self, view: memoryview) -> int:
        got = await self._loop.sock_recv_into(self._sock, view)
        if got == 0 and view.nbytes > 0:
            raise ConnectionResetError("the peer closed the connection")
        return got


async def connect(address: NodeAddress, greeting: handshake.Hello, secret: bytes, no_progress_s: float) -> Channel:
    """Connect and prove each other.

    Raises ``OSError`` (``TimeoutError`` included), :class:`AuthenticationError`, :class:`StaleGenerationError`,
    :class:`NotReadyError`, :class:`ProtocolError`.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANDSHAKE_S):
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, target = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, target)
            channel = Channel(sock, no_progress_s)
            hello = handshake.encode(greeting)
            await channel.send_small(hello)
            challenge = handshake.decode(await channel.receive_small(), handshake.Challenge)
            await channel.send_small(handshake.encode(handshake.answer(secret, hello, challenge)))
            verdict = handshake.decode(await channel.receive_small(), handshake.Verdict)
            handshake.check_verdict(verdict, greeting)
        except BaseException:
            sock.close()
            raise
        return channel


async def welcome(
    channel: Channel, secret: bytes, admit: Callable[[handshake.Hello], handshake.Verdict]
) -> tuple[handshake.Hello, handshake.Verdict]:
    """The server's half. ``admit`` decides once the client has proven itself, *before* it is told: whatever an
    admission entails must be done in it, because a change of generation may come while the verdict is sent.

    Raises ``OSError``, :class:`AuthenticationError`, :class:`ProtocolError`, :class:`NoProgressError`.
    """
    async with asyncio.timeout(HANDSHAKE_S):
        raw = await channel.receive_small()
        greeting = handshake.decode(raw, handshake.Hello)
        challenge = handshake.challenge(secret, raw)
        await channel.send_small(handshake.encode(challenge))
        answer = handshake.decode(await channel.receive_small(), handshake.Answer)
        handshake.check_answer(secret, raw, challenge, answer)
        verdict = admit(greeting)
        await channel.send_small(handshake.encode(verdict))
    return greeting, verdict
