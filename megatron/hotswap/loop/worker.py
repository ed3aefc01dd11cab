"""One seat's training process under protection: set-up, regions that survive failures, recovery, the end.

A *region* is a piece of upstream that is left by an exception when the job is fenced and run again after recovery:
``train()`` is region 0, each evaluation or save after it is the next one, the end of the job is the last. A rank
leaves a region only when all have finished its body, so ranks are never more than one region apart, and a newcomer
skips the regions that are over.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import get_args, get_timers
from megatron.training import training as upstream

from deadpool_ext.control.session import FencedError, SupersededError, WaitTimeoutError, WorkerSession
from deadpool_ext.protocol.messages import (
    ArenaReady,
    CollectiveFailed,
    Constructed,
    Fence,
    Finish,
    Rebuilt,
    Recover,
    Rendezvous,
    Restored,
    SpecDeclared,
    TrainingFinished,
    WorkerUnwound,
)
from deadpool_ext.protocol.types import (
    InvariantError,
    SeatPlan,
    ShardSpec,
    SourceKind,
    UsageError,
    Version,
    WorkerState,
    invariant,
)
from deadpool_ext.replication.errors import CorruptSlotError, GateTimeoutError, StoppedError
from deadpool_ext.replication.errors import FencedError as BoardFencedError
from megatron.hotswap.device.health import break_device, cause_of, probe_device
from megatron.hotswap.loop import crosscheck
from megatron.hotswap.loop.crosscheck import ParametersDifferError
from megatron.hotswap.loop.faults import TrainerFaults
from megatron.hotswap.loop.places import Places
from megatron.hotswap.loop.reentry import run_resets
from megatron.hotswap.loop.steps import StepKeeper
from megatron.hotswap.loop.unwind import is_communication_error, release_frames, summary
from megatron.hotswap.state import codec, metadata
from megatron.hotswap.state.cursor import DataCursor
from megatron.hotswap.state.metadata import TrainerState
from megatron.hotswap.state.shards import FlatShards, parameters_digest

LAST_REGION = 1 << 20
META_SLACK = 2  # metadata grows a little in the course of a job (counters, Adam's step): reserve twice the first size


class ResilientWorker:
    """Ties one process's session, communicators, state and step keeping together. Main thread unless noted."""

    def __init__(
        self,
        session: WorkerSession,
        communicators: Any,
        sabotage: frozenset[str] = frozenset(),
        places: Places | None = None,
    ) -> None:
        """``sabotage``: names of restores and resets to leave out, so that tests can show that each one matters."""
        self.session = session
        self.communicators = communicators
        self.sabotage = sabotage
        self.options = session.job.options
        self.places = places or Places(None)
        self.faults = TrainerFaults(session.injection, self.places)
        self.cursor = DataCursor(self._fetching)
        self.state: TrainerState | None = None
        self.shards: FlatShards | None = None
        self.keeper: StepKeeper | None = None
        self.region = 0
        self.training_over = False
        self.loading = False  # upstream loads a checkpoint
        self.joined_at = 0  # for a newcomer: the region that the survivors are in
        self._facts: dict[str, list[Any]] = {}
        session.cause_of = lambda error: "connection" if is_communication_error(error) else cause_of(error)
        self._alone = session.solo  # a newcomer that builds alone has nothing in flight that a fence could concern
        session.on_fence(self._on_fence)
        session.set_store_host(self._host_store)
        session.injection.set_action("drop-connection", lambda fault: self._drop_connections())
        session.injection.set_action("sticky-device-error", lambda fault: break_device())

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def connect_first(self) -> None:
        """Before upstream makes its first group: a newcomer builds alone, the others meet at generation 0's store."""
        if self.session.solo:
            self.communicators.solo(self.session.generation)
            return
        met = self.session.wait_for(Rendezvous, self.session.generation, self._deadline("setup_s", 600.0))
        self.communicators.connect(met.generation, met.host, met.port, self._deadline("rebuild_s", 60.0))

    def note_fact(self, name: str, value: Any) -> None:
        """Remember something about set-up that a later newcomer of this seat must be told."""
        self._facts.setdefault(name, []).append(value)

    def train(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for upstream's ``train()``: protect its state, then run it as region 0."""
        forward_step, model, optimizer, scheduler, *rest = args
        config = rest[3]
        forward_step = self.faults.forward_step(forward_step)
        self.state = TrainerState(model=model, optimizer=optimizer, scheduler=scheduler, config=config)
        self.shards = FlatShards(model, optimizer)
        self.faults.install(self.state)
        crosscheck.install_faults(self.session, self.state, self.shards)
        if self.session.solo:
            self._join()
        else:
            self._protect_first()
        result = self.run_region(0, lambda: original(forward_step, model, optimizer, scheduler, *rest, **kwargs))
        self.training_over = True
        return result

    def _first_metadata(self) -> bytes:
        assert self.state is not None
        args = get_args()
        return codec.encode(metadata.capture(self.state, args.iteration, args.num_floating_point_operations_so_far))

    def _declare(self) -> None:
        assert self.shards is not None
        args = get_args()
        meta = self._first_metadata()
        spec = ShardSpec(
            rank=self.session.rank,
            shard_bytes=self.shards.nbytes,
            meta_capacity=META_SLACK * len(meta) + 65536,
            layout_digest=self.shards.layout_digest,
        )
        facts = {name: codec.encode(values) for name, values in self._facts.items()}
        facts["flags"] = codec.encode({key: getattr(args, key) for key in ("do_train", "do_valid", "do_test")})
        self.session.send(SpecDeclared(generation=self.session.generation, spec=spec, facts=facts))

    def _make_keeper(self, generation: int) -> None:
        assert self.state is not None and self.shards is not None
        ready = self.session.wait_for(ArenaReady, generation, self._deadline("setup_s", 600.0))
        self.keeper = StepKeeper(
            self.session, self.state, self.shards, self.cursor, self.faults, self.places, ready.segment_path
        )
        self.keeper.sabotage = self.sabotage
        self.keeper.check = crosscheck.make_check(self.session, self.state, self.shards, self.keeper.segment)
        self.keeper.guard(self.state.optimizer)

    def _protect_first(self) -> None:
        self._declare()
        self._make_keeper(self.session.generation)
        assert self.keeper is not None
        args = get_args()
        self.session.pause.begin(self.session.generation, -1)
        self.keeper.capture(args.iteration, args.num_floating_point_operations_so_far)

    def _join(self) -> None:
        """A newcomer stands where the survivors will be: constructed alone, it waits for its place in a plan."""
        generation = self.session.generation
        self._declare()
        self.places.enter("recovery", 0)
        self.session.send(
            Constructed(
                generation=generation,
                rank=self.session.rank,
                solo_ops=self.communicators.solo_operations(),
                remote_ops=self.communicators.remote_operations(),
            )
        )
        self.joined_at = self._recover(region=-1, generation=generation)

    # ---- regions ---------------------------------------------------------------------------------------------------

    def run_region(self, region: int, body: Callable[[], Any]) -> Any:
        """Run ``body`` until it and everybody else's are finished, recovering as often as needed; returns its result.

        ``SystemExit`` of the body counts as its result and is raised again at the end. Errors that are not the
        consequence of a failure elsewhere are the training script's own and are raised as they are.
        """
        self.region = region
        if region < self.joined_at:
            return None if region else self._skipped_train()
        while True:
            result, leaving = None, None
            try:
                try:
                    result = body()
                except SystemExit as exit_request:
                    leaving = exit_request
                self._close_region(region)
            except (UsageError, InvariantError):
                raise
            except Exception as error:
                if not self._is_failure_elsewhere(error):
                    raise
                detail = summary(error)
                release_frames(error)
            else:
                if leaving is not None:
                    raise leaving
                return result
            # Out of the handler: whatever is raised from here on would carry the old error as its context, and an
            # error of the script itself would look like the consequence of a failure elsewhere.
            if self._recover(region, self._unwound(detail)) > region:
                return result  # all others are beyond: nothing of this region is left to do
            self._prepare_region(region)

    def next_region(self, body: Callable[[], Any]) -> Any:
        """Run the next piece of upstream after ``train()`` as a region of its own."""
        return self.run_region(self.region + 1, body)

    def finish(self) -> None:
        """The script is at its end: report digests, wait until every rank is, under protection like any region."""

        def body() -> None:
            assert self.keeper is not None
            self.session.send(
                TrainingFinished(
                    generation=self.session.generation,
                    rank=self.session.rank,
                    iteration=self.keeper.captured.v,
                    digests=self.digests(),
                )
            )
            self.session.wait_for(Finish, self.session.generation, self._deadline("finish_s", 86400.0))

        if self.keeper is not None:
            self.run_region(LAST_REGION, body)
            self.keeper.close()

    def digests(self) -> dict[str, str]:
        """SHA-256 of this rank's parameters, optimizer state, and chain over its samples."""
        assert self.state is not None and self.shards is not None
        return {
            "parameters": parameters_digest(self.state.model),
            "optimizer": self.shards.digest(),
            "samples": self.state.samples_digest,
        }

    def _skipped_train(self) -> tuple[int, float]:
        self._prepare_region(self.joined_at)  # train() would have left the model so
        args = get_args()
        return args.iteration, args.num_floating_point_operations_so_far

    def _close_region(self, region: int) -> None:
        assert self.keeper is not None
        if region == 0:
            self.keeper.wait_committed()
            self.keeper.cross_check()
        if region != LAST_REGION:
            torch.distributed.barrier()

    def _prepare_region(self, region: int) -> None:
        """Leave model and timers as ``train()`` does, for what upstream runs after it; the resets undid that."""
        assert self.state is not None
        if not region:
            return
        if upstream.should_disable_forward_pre_hook(get_args()):
            upstream.disable_forward_pre_hook(self.state.model, param_sync=False)
        interval = get_timers()("interval-time", log_level=0)
        if not interval._started:
            interval.start()

    # ---- failure ---------------------------------------------------------------------------------------------------

    def _on_fence(self, fence: Fence) -> None:
        # Control thread: nothing of an older generation may start, whatever is in flight ends now.
        if not self._alone:
            self.communicators.fence(fence.generation)
            report = self.communicators.abort(self._deadline("abort_s", 10.0))
            if report.lost:
                self.session.emit(
                    "warning", reason=f"gloo lost {report.lost} operations in the abort; their waiters were woken"
                )
            # Something that may still write into tensors must not outlive the fence: this ends the process.
            invariant(report.complete, f"an operation of the fenced generation does not end: {report.detail}")

    def _drop_connections(self) -> None:
        self.communicators.fence(self.session.generation + 1)
        self.communicators.abort()

    def _host_store(self, generation: int) -> tuple[str, int]:
        # A thread of the session's own.
        _, port = self.communicators.open_store(self.session.host)
        return self.session.host, port

    @contextlib.contextmanager
    def _fetching(self) -> Iterator[None]:
        with self.places.at("data", get_args().curr_iteration + 1):
            self.faults.reach("data")
            with self.session.interruptible():
                yield

    def _is_failure_elsewhere(self, error: BaseException) -> bool:
        told = (FencedError, BoardFencedError, StoppedError, SupersededError, CorruptSlotError, ParametersDifferError)
        silent = (WaitTimeoutError, GateTimeoutError)
        return self.session.fenced or isinstance(error, told + silent) or is_communication_error(error)

    def _unwound(self, detail: str) -> int:
        """Out of the trainer: wait for the fence if it is not here yet, say what the live tensors hold."""
        assert self.state is not None
        self.places.enter("recovery", self.session.iteration or 0)
        self._await_fence(detail)
        probe_device()  # what made a neighbour fail may have broken this process too: then it ends, and is forked again
        self.faults.restart()
        live, dirty = (None, True) if self.keeper is None else self.keeper.stop()
        state = WorkerState(rank=self.session.rank, live=None if dirty else live, dirty=dirty)
        generation = self.session.announced
        self.session.send(WorkerUnwound(generation=generation, state=state, detail=detail))
        self.session.emit("rank_unwound", live=None if live is None else live.v, dirty=dirty, detail=detail)
        run_resets(self.state, "before", self.sabotage)
        return generation

    def _await_fence(self, detail: str) -> None:
        if not self.session.fenced and not self._board_fenced():
            self.session.send(
                CollectiveFailed(generation=self.session.generation, rank=self.session.rank, detail=detail)
            )
        end = time.monotonic() + self._deadline("collective_fence_s", 120.0)
        while not self.session.fenced:
            try:
                self.session.wait_for(Fence, self.session.generation, max(0.0, end - time.monotonic()))
            except SupersededError:
                return
            except WaitTimeoutError:
                raise InvariantError("a collective failed and no new generation was announced") from None

    def _board_fenced(self) -> bool:
        # The agent marks the board before it sends the fence.
        return self.keeper is not None and self.keeper.board.fence_generation() > self.session.generation

    def _recover(self, region: int, generation: int) -> int:
        """Go through one recovery, or through newer ones if they overtake it; returns the region to go on in."""
        while True:
            try:
                return self._recover_once(region, generation)
            except (UsageError, InvariantError):
                raise
            except Exception as error:
                if not self._is_failure_elsewhere(error):
                    raise
                detail = summary(error)
                release_frames(error)
            generation = self._unwound(detail)

    def _recover_once(self, region: int, generation: int) -> int:
        assert self.state is not None
        patience = self._deadline("recover_s", 600.0)
        plan = self.session.wait_for(Recover, generation, patience).plan
        seat = next(seat for seat in plan.seats if seat.rank == self.session.rank)
        if self.keeper is None:
            self._make_keeper(generation)
            run_resets(self.state, "before", self.sabotage)
        met = self.session.wait_for(Rendezvous, generation, patience)
        self._alone = False
        self.session.enter_generation(generation)
        groups = self.communicators.connect(generation, met.host, met.port, self._deadline("rebuild_s", 60.0))
        self.session.send(Rebuilt(generation=generation, rank=self.session.rank, groups=groups))
        nbytes = self._restore(seat, plan.target)
        agreed = self._agree_region(region)
        digest = self._agree_parameters()
        self.session.send(Restored(generation=generation, rank=self.session.rank, nbytes=nbytes, params_digest=digest))
        assert self.keeper is not None
        self.keeper.resume()
        return agreed

    def _restore(self, seat: SeatPlan, target: Version) -> int:
        """Shard, parameters, metadata, iterators, RNG, in this order; returns bytes copied into live tensors."""
        assert self.state is not None and self.shards is not None and self.keeper is not None
        self.faults.reach("recovery", target.v)
        keeper = self.keeper
        keep = seat.source is SourceKind.KEEP and not keeper.dirty
        slot = keeper.own.read(target, shard=not keep)
        nbytes = 0
        if slot.shard is None:
            invariant(keeper.live == target, f"INV-1: rank {seat.rank} keeps {keeper.live}, the plan says {target}")
        else:
            keeper.dirty = True
            nbytes = self.shards.install(slot.shard, self.sabotage)
        saved = codec.decode(slot.meta)
        metadata.restore(self.state, saved, self.sabotage)
        run_resets(self.state, "after", self.sabotage)
        keeper.hold(target)
        if "cursor" not in self.sabotage:
            self.cursor.rewind()
        if "rng" not in self.sabotage:
            metadata.restore_generators(self.state, saved)
        return nbytes

    def _agree_region(self, region: int) -> int:
        agreed = torch.tensor([region], dtype=torch.int64, device=torch.cuda.current_device())
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
        return int(agreed.item())

    def _agree_parameters(self) -> str:
        """Compare model parameters over the data-parallel group; raises InvariantError if they differ (INV-1)."""
        assert self.state is not None
        digest = parameters_digest(self.state.model)
        word = int(digest[:15], 16)
        bounds = torch.tensor([word, -word], dtype=torch.int64, device=torch.cuda.current_device())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(bounds, op=torch.distributed.ReduceOp.MAX, group=group)
        low_high = bounds.tolist()
        invariant(
            (low_high[0] == word and low_high[1] == -word) or bool(self.sabotage),
            f"INV-1: parameters of rank {self.session.rank} differ from its data-parallel peers' after the restore",
        )
        return digest

    def _deadline(self, name: str, default_s: float) -> float:
        return float(self.options.get(name, default_s))
