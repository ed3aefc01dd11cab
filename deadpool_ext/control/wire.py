"""The control plane's wire: authenticated, length-prefixed msgpack frames of the protocol's messages.

A frame is ``length (4 bytes, big endian) | body | HMAC-SHA256(key, sequence || body)``; ``length`` counts body and
MAC. The body is a msgpack pair ``[class name, fields]``. Each direction of each connection has its own key, derived
from the job's secret and both sides' nonces, and its own sequence number, so a frame that is replayed, reordered,
reflected or carried over from another connection is refused. Contents are authenticated, not encrypted.

:class:`Handshake` and :class:`Channel` do no I/O; :class:`Connection` (asyncio) and :class:`BlockingConnection`
(threads) are thin shells around the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any, Final

import msgspec

from deadpool_ext.protocol import messages as protocol_messages
from deadpool_ext.protocol.types import DeadpoolError

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
HANDSHAKE_DEADLINE_S: Final = 10.0
_MAGIC: Final = b"DPW1"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_HELLO_BYTES: Final = len(_MAGIC) + _NONCE_BYTES
_LENGTH: Final = struct.Struct("!I")
_SEQUENCE: Final = struct.Struct("!Q")
_READ_BYTES: Final = 1 << 16


class WireError(DeadpoolError):
    """Something is wrong with a connection of the control plane."""


class ConnectionLostError(WireError):
    """The other side closed the connection, or the system did."""


class AuthenticationError(WireError):
    """The other side does not hold the job's secret, or a frame was altered, replayed, reordered or reflected."""


class FrameError(WireError):
    """A frame is too large or does not decode to a known message."""


# ---- codec ---------------------------------------------------------------------------------------------------------


def _message_types(module: ModuleType) -> dict[str, type]:
    """The message classes that a package exports, by name."""
    return {name: value for name, value in vars(module).items() if isinstance(value, type) and is_dataclass(value)}


_TYPES: Final = _message_types(protocol_messages)
_encoder: Final = msgspec.msgpack.Encoder()
_pair_decoder: Final = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_decoders: Final[dict[str, msgspec.msgpack.Decoder[Any]]] = {}


def encode_message(message: object) -> bytes:
    """Encode a message of ``protocol.messages``. Raises :class:`FrameError` for anything else."""
    name = type(message).__name__
    if _TYPES.get(name) is not type(message):
        raise FrameError(f"{name} is not a message of the protocol")
    return _encoder.encode((name, message))


def decode_message(body: bytes) -> Any:
    """Decode a message; unknown names and wrong field types raise :class:`FrameError`."""
    try:
        name, raw = _pair_decoder.decode(body)
        if name not in _TYPES:
            raise FrameError(f"unknown message {name!r}")
        if name not in _decoders:
            _decoders[name] = msgspec.msgpack.Decoder(_TYPES[name])
        return _decoders[name].decode(raw)
    except msgspec.MsgspecError as error:
        raise FrameError(f"a message does not decode: {error}") from error


# ---- frames --------------------------------------------------------------------------------------------------------


class Channel:
    """Frames of one authenticated connection: packs outgoing messages, unpacks incoming bytes. No I/O, no locks."""

    def __init__(self, send_key: bytes, receive_key: bytes, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()
        self._max = max_frame_bytes

    def pack(self, message: object) -> bytes:
        """The next outgoing frame. Frames must reach the other side in the order they were packed."""
        body = encode_message(message)
        length = len(body) + _MAC_BYTES
        if length > self._max:
            raise FrameError(f"{type(message).__name__} of {length} bytes exceeds the limit of {self._max}")
        mac = _mac(self._send_key, _SEQUENCE.pack(self._sent), body)
        self._sent += 1
        return _LENGTH.pack(length) + body + mac

    def feed(self, data: bytes) -> list[Any]:
        """Take received bytes; return the messages that are complete. Any error makes the channel unusable."""
        self._buffer += data
        messages: list[Any] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if not _MAC_BYTES < length <= self._max:
                raise FrameError(f"a frame of {length} bytes is outside the limits")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH.size : end - _MAC_BYTES])
            mac = bytes(self._buffer[end - _MAC_BYTES : end])
            if not hmac.compare_digest(mac, _mac(self._receive_key, _SEQUENCE.pack(self._received), body)):
                raise AuthenticationError("a frame's authentication code is wrong")
            self._received += 1
            del self._buffer[:end]
            messages.append(decode_message(body))
        return messages


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


class Handshake:
    """Mutual challenge and response, without I/O: feed received bytes to :meth:`feed`, send what it returns.

    client: hello(nonce) -> server: hello(nonce), proof -> client: proof. Each proof is a MAC over both nonces with a
    label of the side that makes it, so that none can be reflected. The side that connects proves itself second.
    """

    def __init__(self, secret: bytes, *, client: bool, nonce: bytes | None = None) -> None:
        self._secret = secret
        self._client = client
        self._nonce = secrets.token_bytes(_NONCE_BYTES) if nonce is None else nonce
        self._peer_nonce = b""
        self._buffer = bytearray()
        self._channel: Channel | None = None

    @property
    def channel(self) -> Channel | None:
        """The authenticated channel, once both sides have proved themselves."""
        return self._channel

    def opening(self) -> bytes:
        """What the connecting side sends first; empty for the other side."""
        return _MAGIC + self._nonce if self._client else b""

    def feed(self, data: bytes) -> bytes:
        """Take received bytes, return the bytes to send. Raises :class:`AuthenticationError`."""
        self._buffer += data
        return self._feed_client() if self._client else self._feed_server()

    def _feed_client(self) -> bytes:
        if len(self._buffer) < _HELLO_BYTES + _MAC_BYTES:
            self._check_magic()
            return b""
        self._take_hello()
        self._check_proof(b"server")
        return self._finish(proof=self._proof(b"client"))

    def _feed_server(self) -> bytes:
        if not self._peer_nonce:
            if len(self._buffer) < _HELLO_BYTES:
                self._check_magic()
                return b""
            self._take_hello()
            return _MAGIC + self._nonce + self._proof(b"server")
        if len(self._buffer) < _MAC_BYTES:
            return b""
        self._check_proof(b"client")
        return self._finish(proof=b"")

    def _check_magic(self) -> None:
        if not _MAGIC.startswith(bytes(self._buffer[: len(_MAGIC)])):
            raise AuthenticationError("the other side does not speak Deadpool's protocol")

    def _take_hello(self) -> None:
        self._check_magic()
        self._peer_nonce = bytes(self._buffer[len(_MAGIC) : _HELLO_BYTES])
        del self._buffer[:_HELLO_BYTES]
        if self._peer_nonce == self._nonce:
            raise AuthenticationError("the other side reflects our own nonce")

    def _check_proof(self, label: bytes) -> None:
        proof = bytes(self._buffer[:_MAC_BYTES])
        del self._buffer[:_MAC_BYTES]
        if not hmac.compare_digest(proof, self._proof(label)):
            raise AuthenticationError("the other side does not hold this job's secret")

    def _nonces(self) -> bytes:
        return self._nonce + self._peer_nonce if self._client else self._peer_nonce + self._nonce

    def _proof(self, label: bytes) -> bytes:
        return _mac(self._secret, b"proof ", label, self._nonces())

    def _finish(self, proof: bytes) -> bytes:
        client_key = _mac(self._secret, b"key client", self._nonces())
        server_key = _mac(self._secret, b"key server", self._nonces())
        mine, other = (client_key, server_key) if self._client else (server_key, client_key)
        self._channel = Channel(mine, other)
        if self._buffer:  # frames may follow the proof in the same segment; the caller drains them with feed(b"")
            self._channel._buffer += self._buffer
            self._buffer.clear()
        return proof


# ---- asyncio -------------------------------------------------------------------------------------------------------


class Connection:
    """An authenticated connection on an event loop. One task receives; any task of the loop may send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, channel: Channel) -> None:
        self._reader = reader
        self._writer = writer
        self._channel = channel
        self._ready: list[Any] = channel.feed(b"")

    @classmethod
    async def open(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        secret: bytes,
        *,
        client: bool,
        deadline_s: float = HANDSHAKE_DEADLINE_S,
    ) -> Connection:
        """Authenticate within ``deadline_s``. On an error the transport is closed and a WireError raised."""
        handshake = Handshake(secret, client=client)
        try:
            async with asyncio.timeout(deadline_s):
                writer.write(handshake.opening())
                while handshake.channel is None:
                    data = await reader.read(_READ_BYTES)
                    if not data:
                        raise ConnectionLostError("the connection ended during the handshake")
                    writer.write(handshake.feed(data))
                await writer.drain()
        except TimeoutError as error:
            writer.close()
            raise ConnectionLostError(f"no handshake within {deadline_s} s") from error
        except OSError as error:
            writer.close()
            raise ConnectionLostError(str(error)) from error
        except WireError:
            writer.close()
            raise
        return cls(reader, writer, handshake.channel)

    def send(self, message: object) -> None:
        """Queue a message; never blocks. A lost connection shows in :meth:`receive`, not here."""
        if not self._writer.is_closing():
            self._writer.write(self._channel.pack(message))

    async def drain(self) -> None:
        """Wait until the queue is short again."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def receive(self) -> Any:
        """The next message. Raises ConnectionLostError at the end, other WireErrors for bad frames."""
        while not self._ready:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError as error:
                raise ConnectionLostError(str(error)) from error
            if not data:
                raise ConnectionLostError("the other side closed the connection")
            self._ready = self._channel.feed(data)
        return self._ready.pop(0)

    def close(self) -> None:
        """Close after what is queued has been written."""
        self._writer.close()

    async def wait_closed(self, deadline_s: float = 1.0) -> None:
        """Wait, bounded, until what is queued is written and the transport is gone."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._writer.wait_closed()


# ---- blocking ------------------------------------------------------------------------------------------------------


class BlockingConnection:
    """The same over a blocking socket. :meth:`send` from any thread; :meth:`receive` from one thread."""

    def __init__(self, sock: socket.socket, channel: Channel) -> None:
        self._sock = sock
        self._channel = channel
        self._send_lock = threading.Lock()
        self._ready: list[Any] = channel.feed(b"")

    @classmethod
    def open(
        cls, sock: socket.socket, secret: bytes, *, client: bool, deadline_s: float = HANDSHAKE_DEADLINE_S
    ) -> BlockingConnection:
        """Authenticate within ``deadline_s``; the socket has no timeout afterwards. Raises WireErrors."""
        handshake = Handshake(secret, client=client)
        end = time.monotonic() + deadline_s
        try:
            sock.sendall(handshake.opening())
            while handshake.channel is None:
                sock.settimeout(max(0.001, end - time.monotonic()))
                data = sock.recv(_READ_BYTES)
                if not data:
                    raise ConnectionLostError("the connection ended during the handshake")
                sock.sendall(handshake.feed(data))
            sock.settimeout(None)
        except OSError as error:
            raise ConnectionLostError(f"no handshake: {error}") from error
        return cls(sock, handshake.channel)

    def fileno(self) -> int:
        """Descriptor to select on. :meth:`pending` must be empty first."""
        return self._sock.fileno()

    def pending(self) -> bool:
        """True if a complete message is buffered already."""
        return bool(self._ready)

    def send(self, message: object) -> None:
        """Send now. Raises ConnectionLostError."""
        with self._send_lock:
            try:
                self._sock.sendall(self._channel.pack(message))
            except OSError as error:
                raise ConnectionLostError(str(error)) from error

    def receive(self) -> Any:
        """Block for the next message. Raises ConnectionLostError at the end, other WireErrors for bad frames."""
        while not self._ready:
            try:
                data = self._sock.recv(_READ_BYTES)
            except OSError as error:
                raise ConnectionLostError(str(error)) from error
            if not data:
                raise ConnectionLostError("the other side closed the connection")
            self._ready = self._channel.feed(data)
        return self._ready.pop(0)

    def close(self) -> None:
        """Shut the connection down; a receiver in another thread wakes with ConnectionLostError."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def new_secret() -> bytes:
    """A fresh secret for one job, 32 random bytes."""
    return os.urandom(32)
