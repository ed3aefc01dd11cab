"""Bracketing every iteration: the gate before the optimizer step, the copy after it, metadata and record at its end.

Order within iteration v+1, on the main thread: forward and backward; *gate* (version v is committed world-wide);
``mutating``; upstream's optimizer step; ``done``; the copy engine starts on the shard; upstream logs (record) and
finishes counters; *capture* adds the metadata, and the slot is sealed as soon as both are in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatron.training import get_args

from deadpool_ext.control.session import WorkerSession
from deadpool_ext.protocol.messages import StepDone
from deadpool_ext.protocol.types import Version, invariant
from deadpool_ext.replication.arena import Segment
from deadpool_ext.replication.board import Board
from deadpool_ext.replication.copy import CopyEngine, Ticket
from deadpool_ext.replication.errors import CorruptSlotError
from deadpool_ext.replication.gate import wait_committed
from megatron.hotswap.loop.crosscheck import ParametersDifferError
from megatron.hotswap.loop.faults import TrainerFaults
from megatron.hotswap.loop.own_slot import OwnSlot
from megatron.hotswap.loop.places import Places
from megatron.hotswap.state import codec, metadata
from megatron.hotswap.state.cursor import DataCursor
from megatron.hotswap.state.metadata import TrainerState
from megatron.hotswap.state.shards import FlatShards

RECORDS_KEPT = 3  # carried in the metadata, so that records a lost process had not sent yet are not lost
COPY_DEADLINE_S = 120.0
GATE_WARNING_S = 1.0  # said while it lasts, so that somebody who looks knows what the job waits for
GATE_EVENT_S = 0.005  # shorter waits are the resolution of the poll, not a stall worth an event


class StepKeeper:
    """Keeps what the live tensors hold (``live``, ``dirty``), what is captured, and the copy in flight."""

    def __init__(
        self,
        session: WorkerSession,
        state: TrainerState,
        shards: FlatShards,
        cursor: DataCursor,
        faults: TrainerFaults,
        places: Places,
        segment_path: str,
    ) -> None:
        """``segment_path``: this rank's arena segment, owned by the node's agent."""
        self.session = session
        self.state = state
        self.shards = shards
        self.cursor = cursor
        self.faults = faults
        self.places = places
        self.segment = Segment.open(segment_path)
        self.board = Board.open(session.board_path)
        self.engine = CopyEngine(on_copy=lambda version, copied: faults.reach("d2h", version.v))
        self.sabotage: frozenset[str] = frozenset()
        self.check: Callable[[Version], None] = lambda version: None  # at the gate, of the version that is held
        self.live: Version | None = None
        self.dirty = False
        self.own = OwnSlot(session, self.segment, self.engine, shards)
        self.stall_s = 0.0  # exposed stall of the current iteration
        self._ticket: Ticket | None = None
        self._previous_end = time.monotonic()
        self._recorder = session.rank == session.world_size - 1

    @property
    def captured(self) -> Version:
        """The version whose slot was sealed last, or restored from."""
        return self.own.version

    # ---- optimizer step --------------------------------------------------------------------------------------------

    def guard(self, optimizer: Any) -> None:
        """Bracket ``optimizer.step`` of the (chained) optimizer instance; the class stays untouched."""
        original = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self.places.enter("optimizer", self.captured.v + 1)
            self.faults.reach("gate")
            self.wait_committed()
            self.cross_check()
            return self._mutate(original, args, kwargs)

        optimizer.step = step

    def wait_committed(self) -> None:
        """Wait until the last captured version is committed in this generation; raises FencedError on a fence.

        It never is if its slot turns out to be bad while it is streamed: then it is written again.
        """
        if "gate" in self.sabotage:
            return
        started, told = time.monotonic(), False

        def should_stop() -> bool:
            nonlocal told
            waiting = time.monotonic() - started
            if waiting > GATE_WARNING_S and not told:
                told = True
                self.session.emit("gate_wait", seconds=waiting, version=self.captured.v, still_waiting=True)
            self._mend()
            return self.session.fenced

        with self.places.at("gate", self.captured.v + 1):
            waited = wait_committed(
                self.board,
                self.session.generation,
                self.captured,
                deadline=time.monotonic() + float(self.session.job.options.get("gate_s", 300.0)),
                should_stop=should_stop,
            )
        self.stall_s += waited
        if waited > GATE_EVENT_S:
            self.session.emit("gate_wait", seconds=waited, version=self.captured.v, still_waiting=False)

    def cross_check(self) -> None:
        """Compare with the other replicas if it is time; see :mod:`~megatron.hotswap.loop.crosscheck`.

        To be called where the live tensors hold a committed version. Raises ParametersDifferError.
        """
        try:
            self.check(self.captured)
        except ParametersDifferError:
            self.dirty = True  # whoever it is that deviates: nobody of the group keeps what it has
            raise
        self._mend()  # the own slot, if it was that which turned out bad

    def _mend(self) -> None:
        ticket = self.own.start_mending()
        if ticket is None:
            return
        self._ticket = ticket  # given up by stop() if anything is raised
        ticket.wait(COPY_DEADLINE_S, self._newer_generation)
        self._ticket = None
        try:
            self.own.mended(ticket)
        except CorruptSlotError:
            self.dirty = True  # what the live tensors hold is no version that anybody has
            raise

    def _mutate(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Not the captured one and one more: upstream may have left out iterations (--iterations-to-skip).
        version = Version(v=get_args().curr_iteration + 1, lineage=self.session.generation)
        self.session.check_fence()
        self.dirty = True
        self.segment.begin_mutation(version.v)
        result = original(*args, **kwargs)
        self.hold(version)
        self.start_copy(version)
        return result

    def hold(self, version: Version) -> None:
        """The live tensors hold exactly ``version``, here and for whoever looks at the arena."""
        self.live, self.dirty = version, False
        self.segment.set_live(version)

    # ---- copy and capture ------------------------------------------------------------------------------------------

    def start_copy(self, version: Version) -> None:
        """Start copying the shard into a free slot; the tensors must stay as they are until the next gate."""
        invariant(self._ticket is None, "INV-3: a copy is started while the one before is unfinished")
        self._ticket = self.engine.start(self.segment, version, self.shards.sources())

    def capture(self, iteration: int, flops: float) -> None:
        """Upstream has finished iteration ``iteration``: take its metadata; the slot is sealed with it."""
        version = Version(v=iteration, lineage=self.session.generation)
        if self._ticket is None:  # an iteration without an optimizer step
            self.hold(version)
            self.start_copy(version)
        assert self._ticket is not None
        invariant(self._ticket.version == version, f"captured {version}, but {self._ticket.version} is being copied")
        meta = codec.encode(metadata.capture(self.state, iteration, flops))
        self._ticket.wait(COPY_DEADLINE_S, self._newer_generation)
        ticket, self._ticket = self._ticket, None
        self.own.sealed(ticket.finish(meta), meta)
        self.session.iteration = iteration + 1
        self.session.emit(
            "snapshot_sealed", version=iteration, bytes=ticket.nbytes + len(meta), seconds=ticket.d2h_seconds
        )
        with self.places.at("pause", iteration + 1):
            self.session.pause_point(iteration)

    def _newer_generation(self) -> int | None:
        return self.session.announced if self.session.fenced else None

    def record(self, iteration: int, losses: dict[str, Any], grad_norm: Any, fields: dict[str, Any]) -> None:
        """Upstream logs iteration ``iteration``: close its sample hash and, on the recording rank, report it."""
        self.state.samples_digest = self.cursor.samples.close(self.state.samples_digest)
        now = time.monotonic()
        self.places.finish_iteration(now - self._previous_end, self.stall_s)
        self.places.enter("post_step", iteration)
        loss = float(losses["lm loss"]) if "lm loss" in losses else None
        norm = None if grad_norm is None else float(grad_norm)
        record = {
            "iteration": iteration,
            "generation": self.session.generation,
            "lm_loss": loss,
            "lm_loss_hex": None if loss is None else loss.hex(),
            "grad_norm": norm,
            "grad_norm_hex": None if norm is None else norm.hex(),
            "step_seconds": now - self._previous_end,
            "exposed_stall_seconds": self.stall_s,
            "d2h_bytes": self.shards.nbytes,
            "h2h_bytes": self.shards.nbytes,
            **fields,
        }
        self._previous_end, self.stall_s = now, 0.0
        if self._recorder:
            self.state.records = (*self.state.records, record)[-RECORDS_KEPT:]
            self.session.send(StepDone(generation=self.session.generation, rank=self.session.rank, record=record))
        self.faults.reach("post_step", iteration)

    # ---- failure ---------------------------------------------------------------------------------------------------

    def stop(self) -> tuple[Version | None, bool]:
        """Out of the trainer: give up an unsealed copy; returns what the live tensors hold and whether torn."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.abandon()
        return self.live, self.dirty

    def close(self) -> None:
        """The job is over: end the copy thread and let go of the arena."""
        self.engine.close()
        self.segment.close()
        self.board.close()

    def resume(self) -> None:
        """After a restore: report the records that came with it; those already known are dropped by the receiver."""
        self._previous_end = time.monotonic()
        self.stall_s = 0.0
        self.places.restart()
        self.session.iteration = self.captured.v + 1
        self.session.pause.begin(self.session.generation, self.captured.v)
        if self._recorder:
            for record in self.state.records:
                self.session.send(StepDone(generation=self.session.generation, rank=self.session.rank, record=record))
