"""Everything of a rank that is not a tensor of its shard: counters, schedule, optimizer groups, rerun machine, RNG.

One function captures a section and its twin restores it; the table ``SECTIONS`` at the end is the order in which they
are put back. RNG is last because rebuilding data iterators, which happens between, draws from torch's generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core import num_microbatches_calculator as microbatches
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.training import get_args

from megatron.hotswap.state.rng import capture_rng, restore_rng
from megatron.hotswap.state.shards import leaf_optimizers

# Counters that upstream keeps in its argument namespace.
ARGUMENT_FIELDS = (
    "iteration",
    "curr_iteration",
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "num_floating_point_operations_so_far",
    "do_train",
    "do_valid",
    "do_test",
    "eval_iters",
)
_SCALARS = (bool, int, float, str, type(None))


@dataclass(kw_only=True)
class TrainerState:
    """What upstream's ``train()`` was given, and what changes in the course of it. Main thread only."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    config: Any
    samples_digest: str = ""  # chain over all microbatches consumed up to the captured iteration
    records: tuple[dict[str, Any], ...] = ()  # the last finished iterations, as reported


def _scalars(obj: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(obj).items() if isinstance(value, _SCALARS)}


def _capture_arguments(state: TrainerState, iteration: int, flops: float) -> dict[str, Any]:
    args = get_args()
    fields = {key: getattr(args, key) for key in ARGUMENT_FIELDS if hasattr(args, key)}
    return fields | {"iteration": iteration, "num_floating_point_operations_so_far": flops}


def _restore_arguments(state: TrainerState, saved: dict[str, Any]) -> None:
    vars(get_args()).update(saved)


def _capture_optimizer(state: TrainerState, iteration: int, flops: float) -> list[dict[str, Any]]:
    return [
        {
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in leaf.optimizer.param_groups],
            "scaler": leaf.grad_scaler.state_dict() if leaf.grad_scaler is not None else None,
        }
        for leaf in leaf_optimizers(state.optimizer)
    ]


def _restore_optimizer(state: TrainerState, saved: list[dict[str, Any]]) -> None:
    for leaf, part in zip(leaf_optimizers(state.optimizer), saved, strict=True):
        for group, fields in zip(leaf.optimizer.param_groups, part["groups"], strict=True):
            for absent in set(group) - set(fields) - {"params"}:
                del group[absent]  # e.g. Adam's step, which appears only with the first step
            group.update(fields)
        if part["scaler"] is not None:
            leaf.grad_scaler.load_state_dict(part["scaler"])


def _capture_scheduler(state: TrainerState, iteration: int, flops: float) -> dict[str, Any]:
    return _scalars(state.scheduler)


def _restore_scheduler(state: TrainerState, saved: dict[str, Any]) -> None:
    vars(state.scheduler).update(saved)


def _capture_microbatches(state: TrainerState, iteration: int, flops: float) -> dict[str, Any]:
    return _scalars(microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR)


def _restore_microbatches(state: TrainerState, saved: dict[str, Any]) -> None:
    vars(microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR).update(saved)


def _capture_rerun(state: TrainerState, iteration: int, flops: float) -> dict[str, Any]:
    machine = get_rerun_state_machine()
    return {
        "scalars": {k: v for k, v in _scalars(machine).items() if k not in ("mode", "state")},
        "mode": machine.mode.value,
        "state": machine.state.value,
        "large_value_counts": dict(machine.large_value_counts),
        "max_values": dict(machine.max_values),
    }


def _restore_rerun(state: TrainerState, saved: dict[str, Any]) -> None:
    # Left in RUNNING state by an interrupted step, the machine would skip the next forward and backward pass.
    machine = get_rerun_state_machine()
    vars(machine).update(saved["scalars"])
    machine.mode = RerunMode(saved["mode"])
    machine.state = RerunState(saved["state"])
    machine.large_value_counts = dict(saved["large_value_counts"])
    machine.max_values = dict(saved["max_values"])
    machine.validation_counts.clear()
    machine.saved_state = None
    machine.data_iterator_checkpoints = None
    machine.failed_validation_call = None
    machine.initial_result = None
    machine.saved_results.clear()


def _capture_record(state: TrainerState, iteration: int, flops: float) -> dict[str, Any]:
    return {"samples_digest": state.samples_digest, "records": list(state.records)}


def _restore_record(state: TrainerState, saved: dict[str, Any]) -> None:
    state.samples_digest = saved["samples_digest"]
    state.records = tuple(saved["records"])


def _capture_rng(state: TrainerState, iteration: int, flops: float) -> dict[str, Any]:
    return capture_rng()


def _restore_rng(state: TrainerState, saved: dict[str, Any]) -> None:
    restore_rng(saved)


@dataclass(frozen=True, slots=True)
class Section:
    """One named part of the metadata: how it is captured, how it is put back."""

    name: str
    capture: Callable[[TrainerState, int, float], Any]
    restore: Callable[[TrainerState, Any], None]


SECTIONS = (
    Section("arguments", _capture_arguments, _restore_arguments),
    Section("optimizer", _capture_optimizer, _restore_optimizer),
    Section("scheduler", _capture_scheduler, _restore_scheduler),
    Section("microbatches", _capture_microbatches, _restore_microbatches),
    Section("rerun", _capture_rerun, _restore_rerun),
    Section("record", _capture_record, _restore_record),
)
RNG = Section("rng", _capture_rng, _restore_rng)


def capture(state: TrainerState, iteration: int, flops: float) -> dict[str, Any]:
    """Metadata of the state after ``iteration``, taken where upstream has finished changing it. Main thread."""
    return {section.name: section.capture(state, iteration, flops) for section in (*SECTIONS, RNG)}


def restore(state: TrainerState, saved: dict[str, Any], skip: frozenset[str] = frozenset()) -> None:
    """Put back all sections but RNG (see :func:`restore_generators`). ``skip`` exists for tests of the tests."""
    for section in SECTIONS:
        if section.name not in skip:
            section.restore(state, saved[section.name])


def restore_generators(state: TrainerState, saved: dict[str, Any]) -> None:
    """Put back the RNG section: after the data iterators are rebuilt, before anything runs."""
    RNG.restore(state, saved[RNG.name])
