"""Who is at the other end: a mutual challenge over the job's secret, then the generation (INV-4). Pure.

    client  Hello(purpose, generation, from, to, rank, nonce)      ->
            <- Challenge(nonce, HMAC("server", hello, nonce))      server
    client  Answer(HMAC("client", hello, nonce))                   ->
            <- Verdict(ok | stale | not_ready | refused)           server

Each side's proof covers both nonces, so neither can be replayed; the labels keep one from being used as the other.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
from dataclasses import dataclass

import msgspec

from deadpool_ext.replication.errors import (
    AuthenticationError,
    NotReadyError,
    ProtocolError,
    StaleGenerationError,
)

MAX_BYTES = 4096
_PROTOCOL = "deadpool-replicator/1"


class Purpose(enum.StrEnum):
    """What a connection is for."""

    STREAM = "stream"
    DONE = "done"
    FETCH = "fetch"


class Answered(enum.StrEnum):
    """How a server decides about a proven client."""

    OK = "ok"
    STALE = "stale"  # the client's generation is over
    NOT_READY = "not_ready"  # the server is not there yet: try again
    REFUSED = "refused"  # meant for somebody else


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Opens a connection from ``node`` to ``to``; ``rank`` is the one streamed or fetched, -1 where there is none."""

    protocol: str
    purpose: Purpose
    generation: int
    node: str
    to: str
    rank: int
    nonce: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenge:
    """The server's nonce and proof."""

    nonce: bytes
    proof: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The client's proof."""

    proof: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The server's decision and its own generation."""

    answer: Answered
    generation: int


def hello(*, purpose: Purpose, generation: int, node: str, to: str, rank: int = -1) -> Hello:
    """A client's first message, with a fresh nonce."""
    return Hello(
        protocol=_PROTOCOL,
        purpose=purpose,
        generation=generation,
        node=node,
        to=to,
        rank=rank,
        nonce=secrets.token_bytes(32),
    )


def challenge(secret: bytes, greeting: bytes) -> Challenge:
    """The server's answer to an encoded Hello."""
    nonce = secrets.token_bytes(32)
    return Challenge(nonce=nonce, proof=_proof(secret, b"server", greeting, nonce))


def answer(secret: bytes, greeting: bytes, given: Challenge) -> Answer:
    """The client's proof. Raises :class:`AuthenticationError` if the server does not know the secret."""
    if not hmac.compare_digest(given.proof, _proof(secret, b"server", greeting, given.nonce)):
        raise AuthenticationError("the server does not know this job's secret")
    return Answer(proof=_proof(secret, b"client", greeting, given.nonce))


def check_answer(secret: bytes, greeting: bytes, given: Challenge, answered: Answer) -> None:
    """Raises :class:`AuthenticationError` if the client does not know the secret."""
    if not hmac.compare_digest(answered.proof, _proof(secret, b"client", greeting, given.nonce)):
        raise AuthenticationError("a client does not know this job's secret")


def check_verdict(verdict: Verdict, greeting: Hello) -> None:
    """Raise what the verdict says, unless it is ok."""
    match verdict.answer:
        case Answered.OK:
            return
        case Answered.STALE:
            raise StaleGenerationError(greeting.generation, verdict.generation)
        case Answered.NOT_READY:
            raise NotReadyError(f"{greeting.to} is not ready for generation {greeting.generation}")
        case Answered.REFUSED:
            raise ProtocolError(f"the server is not {greeting.to}")


def encode(message: Hello | Challenge | Answer | Verdict) -> bytes:
    """At most MAX_BYTES bytes."""
    return msgspec.msgpack.encode(message)


def decode[T: (Hello, Challenge, Answer, Verdict)](raw: bytes, kind: type[T]) -> T:
    """Raises :class:`AuthenticationError` on anything else than a well-formed ``kind``."""
    try:
        message = msgspec.msgpack.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise AuthenticationError(f"not a {kind.__name__} of this protocol") from error
    if isinstance(message, Hello) and message.protocol != _PROTOCOL:
        raise AuthenticationError(f"the client speaks {message.protocol!r}, this is {_PROTOCOL!r}")
    return message


def _proof(secret: bytes, label: bytes, greeting: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, b"|".join((label, hashlib.sha256(greeting).digest(), nonce)), "sha256").digest()
