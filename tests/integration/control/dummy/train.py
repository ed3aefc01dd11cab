"""A stand-in for the trainer: a chain of hashes as state, the commit of a version as the only synchronisation.

It goes through everything that a protected trainer does with its session, in some hundred lines and without torch.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

from deadpool_ext import _native
from deadpool_ext.control import session as control
from deadpool_ext.control.session import SupersededError, WorkerSession
from deadpool_ext.protocol.messages import (
    ArenaReady,
    Constructed,
    Finish,
    Rebuilt,
    Recover,
    Rendezvous,
    Restored,
    SpecDeclared,
    StepDone,
    TrainingFinished,
    WorkerUnwound,
)
from deadpool_ext.protocol.types import ShardSpec, Version, WorkerState
from deadpool_ext.replication.arena import Segment
from deadpool_ext.replication.board import Board
from deadpool_ext.replication.errors import FencedError
from deadpool_ext.replication.gate import wait_committed

SHARD_BYTES = 1 << 16
WAIT_S = 30.0


def advance(state: bytes, v: int) -> bytes:
    """The state after iteration ``v``."""
    return (hashlib.sha256(state + v.to_bytes(4, "big")).digest() * (SHARD_BYTES // 32))[:SHARD_BYTES]


class Trainer:
    """One seat."""

    def __init__(self, session: WorkerSession, steps: int, step_seconds: float, claimed_bytes: int) -> None:
        self.session = session
        self.steps = steps
        self.step_seconds = step_seconds
        self.claimed_bytes = claimed_bytes
        self.board = Board.open(session.board_path)
        self.segment: Segment | None = None
        self.version: Version | None = Version(v=0, lineage=0)
        self.state = advance(b"start", session.rank)
        session.set_store_host(lambda generation: ("127.0.0.1", 1))

    def declare(self) -> None:
        spec = ShardSpec(
            rank=self.session.rank, shard_bytes=self.claimed_bytes, meta_capacity=64, layout_digest="0123456789abcdef"
        )
        self.session.send(SpecDeclared(generation=self.session.generation, spec=spec))

    def map_segment(self, generation: int) -> None:
        ready = self.session.wait_for(ArenaReady, generation, WAIT_S)
        if self.segment is None:
            self.segment = Segment.open(ready.segment_path)

    def save(self) -> None:
        assert self.segment is not None and self.version is not None
        slot = self.segment.begin(self.version)
        self.segment.writable(slot).shard[:] = self.state
        self.segment.seal(slot, b"meta", _native.crc32c(self.state))

    def run(self) -> None:
        generation = self.session.generation
        if self.session.solo:
            self.version = None
            self.declare()
            self.session.send(Constructed(generation=generation, rank=self.session.rank, solo_ops=1, remote_ops=0))
            self.recover(generation)
        else:
            self.session.wait_for(Rendezvous, generation, WAIT_S)
            self.declare()
            self.map_segment(generation)
            self.save()
        while True:
            try:
                self.train()
                self.finish()
                return
            except (FencedError, SupersededError):
                self.unwind()

    def train(self) -> None:
        session = self.session
        assert self.version is not None
        while self.version.v < self.steps:
            began = time.monotonic()
            step = self.version.v + 1
            session.fault_point("forward", step)
            stall = wait_committed(self.board, session.generation, self.version, time.monotonic() + WAIT_S)
            time.sleep(self.step_seconds)
            self.state = advance(self.state, step)
            self.version = Version(v=step, lineage=session.generation)
            session.fault_point("optimizer", step)
            self.save()
            if session.rank == session.world_size - 1:
                loss = 1.0 / step
                record = {"iteration": step, "generation": session.generation, "lm_loss": loss}
                record |= {"lm_loss_hex": loss.hex(), "grad_norm": 1.0, "grad_norm_hex": (1.0).hex()}
                record |= {"step_seconds": time.monotonic() - began, "exposed_stall_seconds": stall}
                session.send(StepDone(generation=session.generation, rank=session.rank, record=record))

    def finish(self) -> None:
        session = self.session
        assert self.version is not None
        wait_committed(self.board, session.generation, self.version, time.monotonic() + WAIT_S)
        digests = {"state": hashlib.sha256(self.state).hexdigest()}
        session.send(
            TrainingFinished(
                generation=session.generation, rank=session.rank, iteration=self.version.v, digests=digests
            )
        )
        session.wait_for(Finish, session.generation, WAIT_S)

    def unwind(self) -> None:
        while True:
            end = time.monotonic() + WAIT_S
            while not self.session.fenced:  # the board is fenced before the session is told
                assert time.monotonic() < end
                time.sleep(0.001)
            generation = self.session.announced
            state = WorkerState(rank=self.session.rank, live=self.version, dirty=self.version is None)
            self.session.send(WorkerUnwound(generation=generation, state=state, detail=""))
            try:
                self.recover(generation)
                return
            except SupersededError:
                continue

    def recover(self, generation: int) -> None:
        session = self.session
        plan = session.wait_for(Recover, generation, WAIT_S).plan
        self.map_segment(generation)
        session.wait_for(Rendezvous, generation, WAIT_S)
        session.enter_generation(generation)
        session.send(Rebuilt(generation=generation, rank=session.rank, groups=1))
        session.fault_point("recovery", plan.target.v)
        assert self.segment is not None
        self.state = bytes(self.segment.read(plan.target).shard)
        self.version = plan.target
        session.send(Restored(generation=generation, rank=session.rank, nbytes=SHARD_BYTES, params_digest="same"))


def main() -> None:
    session = control.current()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    print("dummy", sys.argv[1:], [os.environ.get(name) for name in names], flush=True)
    if "--fail" in sys.argv:
        raise ValueError("the dummy fails as asked")
    if session is not None:
        options = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
        trainer = Trainer(
            session,
            int(options["--steps"]),
            float(options.get("--step-seconds", 0)),
            int(options.get("--claimed-bytes", SHARD_BYTES)),
        )
        trainer.run()


if __name__ == "__main__":
    main()
