"""Asking something of a running job from its run directory: one request, its answers."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from deadpool_ext.control.rundir import CONTROL, EVENTS
from deadpool_ext.control.wire import AuthenticationError, BlockingConnection, WireError
from deadpool_ext.protocol.messages import OperatorAnswer, OperatorHello, OperatorRequest
from deadpool_ext.protocol.types import DeadpoolError, UsageError

CONNECT_SECONDS: Final = 5.0


class OperatorError(DeadpoolError):
    """The job cannot be asked, or it said no."""


def ask(run_dir: Path, command: str, arguments: dict[str, str]) -> Iterator[OperatorAnswer]:
    """Send a request to the coordinator of the job whose run directory this is; yields its answers to the final one.

    Raises UsageError where there is no running job, OperatorError where it does not answer.
    """
    host, port, secret = whereabouts(run_dir)
    try:
        sock = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    except OSError as error:
        why = error.strerror or str(error)
        raise OperatorError(f"{run_dir}: nobody answers at {host}:{port} ({why}): the job is not running") from error
    connection: BlockingConnection | None = None
    try:
        connection = BlockingConnection.open(sock, secret, client=True)
        request = secrets.token_hex(8)
        connection.send(OperatorHello(name=f"deadpool {command}"))
        connection.send(OperatorRequest(request=request, command=command, arguments=arguments))
        while True:
            message = connection.receive()
            if isinstance(message, OperatorAnswer) and message.request == request:
                yield message
                if message.final:
                    return
    except AuthenticationError as error:
        raise OperatorError(f"{run_dir}: what answers at {host}:{port} is not this job; it is over") from error
    except WireError as error:
        raise OperatorError(f"{run_dir}: the job ended before it answered ({error})") from error
    finally:
        if connection is not None:
            connection.close()
        sock.close()


def is_running(run_dir: Path) -> bool | None:
    """Whether the job of this run directory still has a coordinator; None where that cannot be told from here."""
    try:
        host, port, secret = whereabouts(run_dir)
    except UsageError:
        return None if os.path.lexists(run_dir / CONTROL) else False
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as sock:
            BlockingConnection.open(sock, secret, client=True, deadline_s=CONNECT_SECONDS)
            return True
    except (ConnectionRefusedError, AuthenticationError):
        return False
    except (OSError, WireError):
        return None


def whereabouts(run_dir: Path) -> tuple[str, int, bytes]:
    """Host, port and secret of the coordinator. Raises UsageError where there is none to be found."""
    path = run_dir / CONTROL
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["host"]), int(content["port"]), bytes.fromhex(content["secret"])
    except FileNotFoundError:
        if (run_dir / EVENTS).exists():
            raise UsageError(f"{run_dir}: the job is over") from None
        raise UsageError(f"{run_dir}: no run directory of a protected job, or it has not begun") from None
    except NotADirectoryError:
        raise UsageError(f"{run_dir} is a file, no run directory") from None
    except PermissionError:
        raise UsageError(f"{path}: only the user who started the job may ask it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not readable ({error})") from error
