"""Comparing what must be equal: parameters over the data-parallel groups, and the optimizer state with its sealed copy.

It runs at the gate, before an optimizer step: there every parameter was gathered for the forward pass, with overlap
too, nothing has changed since, and the version is committed. Nothing is written, and no random number is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.training import get_args

from deadpool_ext import _native
from deadpool_ext.control.session import WorkerSession
from deadpool_ext.protocol.crosscheck import Evidence, judge
from deadpool_ext.protocol.messages import ReplicaMismatch
from deadpool_ext.protocol.types import DeadpoolError, Version
from deadpool_ext.replication.arena import Segment
from megatron.hotswap.state.metadata import TrainerState
from megatron.hotswap.state.shards import FlatShards, host_bytes, leaf_optimizers


class ParametersDifferError(DeadpoolError):
    """Parameters of the data-parallel group differ, and the coordinator, who was told, will make the job go back."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A data-parallel group, and the buffers that are gathered over it."""

    group: Any
    buffers: list[Any]

    @property
    def size(self) -> int:
        return int(torch.distributed.get_world_size(self.group))

    @property
    def position(self) -> int:
        return int(torch.distributed.get_rank(self.group))

    def region(self, position: int) -> Iterator[torch.Tensor]:
        """The parts of all buffers that the rank at ``position`` owns."""
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                if bucket.param_data is not None:
                    flat = bucket.param_data.view(-1)
                    width = flat.numel() // self.size
                    yield flat[position * width : (position + 1) * width]

    def fingerprint(self, position: int) -> int:
        """CRC-32C of a region."""
        crc = 0
        for part in self.region(position):
            crc = _native.crc32c(host_bytes(part), crc)
        return crc


class ParameterCheck:
    """One rank's part in the comparison. Main thread only; collective over the data-parallel groups."""

    def __init__(
        self,
        session: WorkerSession,
        state: TrainerState,
        shards: FlatShards,
        segment: Segment,
        *,
        every: int,
        stop: bool,
    ) -> None:
        """``every``: number of iterations between two checks. ``stop``: leave the trainer when something differs."""
        self._session = session
        self._state = state
        self._shards = shards
        self._segment = segment
        self._every = every
        self._stop = stop

    def run(self, version: Version) -> None:
        """Compare, if it is ``version``'s turn. The live tensors hold ``version``, and all parameters are gathered.

        Raises :class:`ParametersDifferError` where the job is to go back.
        """
        if version.v <= 0 or version.v % self._every:
            return
        changed = self._changed(version)
        differ = False
        for number, group in enumerate(self._groups()):
            # What the optimizer holds is one thing: it is told once, with the first group.
            differ |= self._compare(group, version, changed if number == 0 else [])
        if differ and self._stop:
            raise ParametersDifferError(f"parameters differ after iteration {version.v}")

    def _groups(self) -> list[_Group]:
        model = self._state.model
        dense = [buffer for chunk in model for buffer in chunk.buffers]
        expert = [buffer for chunk in model for buffer in chunk.expert_parallel_buffers]
        groups = [_Group(model[0].intra_dp_cp_group, dense)]
        if expert:
            groups.append(_Group(model[0].intra_expt_dp_group, expert))
        return groups

    def _changed(self, version: Version) -> list[str]:
        """What of the live optimizer state is not as it was sealed."""
        slot = self._segment.find(version)
        if slot is None:
            return []
        if not self._segment.verify(slot):
            # The slot is at fault, not the tensors: the gate's next wait finds it void and has it written again.
            self._segment.void(slot)
            reason = "the sealed slot does not match its checksum any more"
            self._session.emit("corruption_detected", kind="corrupt_slot", reason=reason, version=version.v)
            return []
        return self._shards.differences(self._segment.views(slot).shard)

    def _compare(self, group: _Group, version: Version, changed: list[str]) -> bool:
        size = group.size
        seen = [group.fingerprint(position) for position in range(size)]
        word = int(hashlib.sha256(repr(seen).encode()).hexdigest()[:15], 16)
        bounds = _tensor([word, -word, int(bool(changed))])
        torch.distributed.all_reduce(bounds, op=torch.distributed.ReduceOp.MAX, group=group.group)
        high, low, any_changed = (int(value) for value in bounds.tolist())
        if high == -low and not any_changed:
            return False
        mine = _tensor([*seen, self._from_main(group), int(not changed)])
        rows = [torch.empty_like(mine) for _ in range(size)]
        torch.distributed.all_gather(rows, mine, group=group.group)
        self._report(group, version, [[int(value) for value in row.tolist()] for row in rows])
        if changed:
            print(f"deadpool: changed since iteration {version.v} was sealed: {', '.join(changed[:8])}", flush=True)
        return True

    def _report(self, group: _Group, version: Version, rows: list[list[int]]) -> None:
        ranks = tuple(torch.distributed.get_process_group_ranks(group.group))
        if group.position != 0:
            return
        size = len(ranks)
        evidence = Evidence(
            ranks=ranks,
            seen=tuple(tuple(row[:size]) for row in rows),
            main=tuple(row[size] for row in rows),
            intact=tuple(bool(row[size + 1]) for row in rows),
        )
        judgement = judge(evidence)
        digests = tuple(hashlib.sha256(repr(row[:size]).encode()).hexdigest()[:16] for row in rows)
        self._session.send(
            ReplicaMismatch(
                generation=self._session.generation,
                rank=self._session.rank,
                version=version,
                group=ranks,
                digests=digests,
                deviating=judgement.deviating,
                spoilt=judgement.spoilt,
                reason=judgement.reason,
            )
        )

    def _from_main(self, group: _Group) -> int:
        """Fingerprint of the own region as the main parameters give it; the region is left as it was."""
        kept = [(part, part.clone()) for other in self._groups() for part in other.region(other.position)]
        for leaf in leaf_optimizers(self._state.optimizer):
            leaf._copy_main_params_to_model_params()
        fingerprint = group.fingerprint(group.position)
        for part, value in kept:
            part.copy_(value)
        return fingerprint


def _tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=torch.cuda.current_device())


def flip_model_parameter(state: TrainerState) -> None:
    """Fault injection: flip one bit of a gathered parameter that another rank owns (the own one in a group of one)."""
    chunk = state.model[0]
    group = _Group(chunk.intra_dp_cp_group, [buffer for chunk in state.model for buffer in chunk.buffers])
    _flip(max(group.region((group.position + 1) % group.size), key=torch.Tensor.numel))


def flip_main_parameter(shards: FlatShards) -> None:
    """Fault injection: flip one bit of a main parameter that this rank's optimizer keeps."""
    _flip(max((entry.tensor for entry in shards.entries if entry.key == "main"), key=torch.Tensor.numel))


def _flip(tensor: torch.Tensor) -> None:
    flat = tensor.detach().view(-1)
    at = flat.numel() // 2
    with torch.no_grad():
        flat[at : at + 1].view(torch.uint8)[:1] ^= 1


def make_check(
    session: WorkerSession, state: TrainerState, shards: FlatShards, segment: Segment
) -> Callable[[Version], None]:
    """What the arguments ask for: a check to be called with every version, or nothing."""
    args = get_args()
    if args.deadpool_check_params_every <= 0:
        return lambda version: None
    every, stop = args.deadpool_check_params_every, args.deadpool_on_mismatch == "swap"
    return ParameterCheck(session, state, shards, segment, every=every, stop=stop).run


def install_faults(session: WorkerSession, state: TrainerState, shards: FlatShards) -> None:
    """Let this process carry out ``corrupt-param`` and ``corrupt-main``."""
    session.injection.set_action("corrupt-param", lambda fault: flip_model_parameter(state))
    session.injection.set_action("corrupt-main", lambda fault: flip_main_parameter(shards))
