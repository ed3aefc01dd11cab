"""``pretrain_gpt.py --deadpool``: ties the launcher's session to upstream's trainer. Imported only under protection."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from deadpool_ext.comm.pulse import Pulse
from deadpool_ext.comm.registry import Communicators
from deadpool_ext.comm.torch_patch import patch_torch
from deadpool_ext.comm.watcher import ErrorWatcher
from deadpool_ext.control import session as control
from deadpool_ext.control.session import SessionLostError, WorkerSession
from deadpool_ext.protocol.messages import CollectiveFailed
from deadpool_ext.protocol.types import UsageError
from megatron.hotswap.loop.places import Places
from megatron.hotswap.loop.worker import ResilientWorker
from megatron.hotswap.patches.base import BASE_PATCHES
from megatron.hotswap.patches.registry import apply, verify
from megatron.hotswap.patches.table import PATCHES
from megatron.hotswap.versions import MEGATRON

SABOTAGE_VARIABLE = "DEADPOOL_TEST_SABOTAGE"  # names of resets and restores to leave out: tests of the tests only


def _report_error(session: WorkerSession, generation: int, detail: str) -> None:
    with contextlib.suppress(SessionLostError):  # then this process ends anyway
        session.send(CollectiveFailed(generation=generation, rank=session.rank, detail=detail))


def protect(launch: Callable[[], Any]) -> None:
    """Run ``launch`` (which calls upstream's ``pretrain``) under protection; returns when every rank has finished.

    Raises :class:`UsageError` when no launcher started this process.
    """
    session = control.current()
    if session is None:
        raise UsageError(
            "--deadpool needs a launcher: start it with `deadpool local ... -- pretrain_gpt.py --deadpool ...` on one "
            "machine or with `deadpool launch ...` on every node"
        )
    sabotage = frozenset(filter(None, os.environ.get(SABOTAGE_VARIABLE, "").split(",")))
    pulse = Pulse.open(session.pulse_path) if session.pulse_path else None
    communicators = Communicators(rank=session.rank, world_size=session.world_size, pulse=pulse)
    patch_torch(communicators)
    worker = ResilientWorker(session, communicators, sabotage, Places(pulse))
    if sabotage:
        session.emit("warning", text=f"sabotaged for a test: {', '.join(sorted(sabotage))}")
    verify(BASE_PATCHES, MEGATRON)  # launch applies them later, when upstream has parsed its arguments
    apply(PATCHES, worker, MEGATRON)
    if communicators.accelerator:
        ErrorWatcher(communicators, partial(_report_error, session)).start()
    worker.connect_first()
    leaving: SystemExit | None = None
    try:
        launch()
    except SystemExit as exit_request:
        if exit_request.code:
            raise
        leaving = exit_request
    worker.finish()
    if leaving is not None:
        raise leaving
