"""Asking the training script's side, before anything is started, what the job will look like.

The question runs in a forked child of the preloaded process: parsing the script's arguments leaves global state
behind, and whatever it prints goes to a log file.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from deadpool_ext.control.processes import die_with_parent, name_process, reset_signals
from deadpool_ext.control.worker import redirect_output
from deadpool_ext.protocol.types import DeadpoolError, Layout, UsageError

EXIT_USAGE: Final = 2
_READ_BYTES: Final = 1 << 16
_LAST_LINE_CHARS: Final = 500


class PreflightError(DeadpoolError):
    """The question could not be answered: the script's side failed by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """What the script's arguments amount to. ``tokens_per_step`` is None where unknown."""

    layout: Layout
    train_iters: int | None = None
    tokens_per_step: int | None = None
    checkpoint: str = ""
    warnings: tuple[str, ...] = ()
    protected: bool = True
    policy: Mapping[str, Any] = field(default_factory=dict)  # what the arguments ask of coordinator and agents


class _Answer(msgspec.Struct, kw_only=True):
    content: dict[str, Any] = {}
    usage: str = ""
    failure: str = ""


def run_preflight(target: str, argv: tuple[str, ...], nodes: int, ranks_per_node: int, log: Path) -> Preflight:
    """Call ``module:function(argv, nodes, ranks_per_node)`` in a forked child and parse its answer.

    The answer is a mapping: ``layout`` (tp, pp, dp, dp_groups), and where known ``train_iters``,
    ``tokens_per_step``, ``checkpoint``, ``warnings``, ``protected`` (whether the arguments ask for protection),
    ``policy``.
    Raises UsageError (the script's own words) for arguments that cannot be, :class:`PreflightError` naming ``log``
    for anything else.
    """
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            die_with_parent(parent)
            reset_signals()
            name_process("dp-preflight")
            redirect_output(log)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(_ask(target, argv, nodes, ranks_per_node)))
        except BaseException:  # nothing may return into the launcher's stack
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    try:
        answer = msgspec.msgpack.decode(data, type=_Answer)
    except msgspec.MsgspecError as error:
        raise PreflightError(f"checking the script's arguments failed; see {log}") from error
    if answer.usage:
        raise UsageError(answer.usage)
    if answer.failure:
        raise PreflightError(f"checking the script's arguments failed: {answer.failure}; see {log}")
    return parse_preflight(answer.content, nodes, ranks_per_node)


def _ask(target: str, argv: tuple[str, ...], nodes: int, ranks_per_node: int) -> _Answer:
    module, _, function = target.partition(":")
    sys.argv = list(argv)
    try:
        inspect = getattr(importlib.import_module(module), function)
        return _Answer(content=dict(inspect(list(argv), nodes, ranks_per_node)))
    except UsageError as error:
        return _Answer(usage=" ".join(str(error).split()))
    except SystemExit as stop:  # argparse said what is wrong on stderr, which is the log
        sys.stderr.flush()
        return _Answer(usage=_last_line(2) or f"the script's arguments are refused (exit code {stop.code})")
    except Exception as error:  # told to the launcher in one line, in full in the log
        traceback.print_exc()
        return _Answer(failure=f"{type(error).__name__}: {error}".splitlines()[0])


def _last_line(descriptor: int) -> str:
    with open(f"/proc/self/fd/{descriptor}", encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1][-_LAST_LINE_CHARS:] if lines else ""


def parse_preflight(content: Mapping[str, Any], nodes: int, ranks_per_node: int) -> Preflight:
    """Check and type an answer. Raises UsageError if the layout does not fill the seats exactly."""
    try:
        given = content["layout"]
        tp, pp, dp = (int(given[key]) for key in ("tp", "pp", "dp"))
        groups = tuple(tuple(int(rank) for rank in group) for group in given["dp_groups"])
        tokens, iterations = content.get("tokens_per_step"), content.get("train_iters")
        layout = Layout(
            world_size=nodes * ranks_per_node,
            ranks_per_node=ranks_per_node,
            tensor_parallel=tp,
            pipeline_parallel=pp,
            data_parallel=dp,
            dp_groups=groups,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PreflightError(f"the script's side gave an answer without a layout: {error!r}") from error
    if sorted(rank for group in groups for rank in group) != list(range(layout.world_size)):
        raise UsageError(
            f"{nodes} nodes of {ranks_per_node} ranks make {layout.world_size} ranks, which tensor x pipeline x data "
            f"parallel sizes {tp} x {pp} x {dp} do not fill"
        )
    return Preflight(
        layout=layout,
        train_iters=None if iterations is None else int(iterations),
        tokens_per_step=None if tokens is None else int(tokens),
        checkpoint=str(content.get("checkpoint") or ""),
        warnings=tuple(str(text) for text in content.get("warnings") or ()),
        protected=bool(content.get("protected", True)),
        policy=dict(content.get("policy") or {}),
    )
