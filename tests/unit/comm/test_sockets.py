"""Only the recorded connections are shut down, whatever happened to their descriptor numbers since."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
import torch  # noqa: F401  (the extension needs its libraries)

from deadpool_ext import _shell


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with connected() as ends:
        yield ends


@contextlib.contextmanager
def connected(family: socket.AddressFamily = socket.AF_INET) -> Iterator[tuple[socket.socket, socket.socket]]:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as listener:
        out = socket.create_connection(listener.getsockname()[:2])
        into, _ = listener.accept()
    with out, into:
        out.settimeout(30)
        into.settimeout(30)
        yield out, into


def endpoint(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def works(out: socket.socket, into: socket.socket) -> bool:
    out.sendall(b"x")
    return into.recv(1) == b"x"


def test_sockets_are_listed_with_their_endpoints(pair: tuple[socket.socket, socket.socket]) -> None:
    out, into = pair
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as other:
        seen = {one.fd: one for one in _shell.tcp_sockets()}
        assert seen[out.fileno()].local == seen[into.fileno()].remote == endpoint(out.getsockname())
        assert not seen[out.fileno()].listening
        assert seen[listener.fileno()].listening
        assert seen[listener.fileno()].local == endpoint(listener.getsockname())
        assert other.fileno() not in seen


def test_recorded_by_either_end_and_shut_down_once(pair: tuple[socket.socket, socket.socket]) -> None:
    out, into = pair
    ledger = _shell.SocketLedger()
    assert ledger.record(locals=set(), remotes={endpoint(out.getpeername())}) == 1
    assert ledger.record(locals={endpoint(into.getsockname())}, remotes=set()) == 1
    assert ledger.record(locals={endpoint(into.getsockname())}, remotes=set()) == 0
    assert (ledger.recorded, ledger.still_open()) == (2, 2)
    assert ledger.shutdown_all() == 2
    assert out.recv(1) == into.recv(1) == b""
    out.close()
    assert ledger.still_open() == 1
    into.close()
    assert ledger.still_open() == 0
    assert ledger.shutdown_all() == 0


def test_listeners_and_strangers_are_never_touched(pair: tuple[socket.socket, socket.socket]) -> None:
    out, into = pair
    ledger = _shell.SocketLedger()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert ledger.record(locals={endpoint(listener.getsockname())}, remotes=set()) == 0
        assert ledger.shutdown_all() == 0
        with socket.create_connection(listener.getsockname()):
            pass
    assert works(out, into)


def test_a_reused_descriptor_number_is_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    out, into = pair
    ledger = _shell.SocketLedger()
    ledger.record(locals=set(), remotes={endpoint(out.getpeername())})
    with connected() as (other_out, other_into):
        os.dup2(other_out.fileno(), out.fileno())  # the number now means the other connection
        assert ledger.still_open() == 0
        assert ledger.shutdown_all() == 0
        assert works(other_out, other_into)
        assert into.recv(1) == b""


def test_addresses_of_both_families() -> None:
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        with connected(socket.AF_INET6) as (out, _):
            seen = {one.fd: one for one in _shell.tcp_sockets()}
            assert seen[out.fileno()].remote == f"[::1]:{out.getpeername()[1]}"
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::", 0))
        listener.listen()
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as out, listener.accept()[0] as into:
            seen = {one.fd: one for one in _shell.tcp_sockets()}
            assert seen[into.fileno()].local == seen[out.fileno()].remote == endpoint(out.getpeername())
