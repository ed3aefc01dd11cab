"""What a rank keeps beside its tensors, field by field: changed after the capture, put back by the restore."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.isolated import in_child

#: Of the rerun machine, why each is not kept. Everything else must be.
RERUN_NOT_KEPT = {
    "error_injector": "upstream's own fault injection",
    "validation_counts": "of the iteration under way; cleared",
    "failed_validation_call": "of the iteration under way; cleared",
    "initial_result": "of the iteration under way; cleared",
    "saved_state": "of the iteration under way; cleared",
    "data_iterator_checkpoints": "of the iteration under way; cleared",
    "saved_results": "of the iteration under way; cleared",
    "state_save_func": "code",
    "state_restore_func": "code",
    "stats": "of --rerun-mode report_stats, which is refused",
}
#: Changed by the set-up of upstream only, so that a newcomer has them already.
SCHEDULER_NOT_KEPT = {"optimizer"}
BATCH_SIZE_NOT_KEPT = {"schedule"}
SCALER_NOT_KEPT = {"min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"}
#: Names of the generators' kinds.
CONSTANT = {"rng.python[0]", "rng.numpy[0]"}
SECTIONS = ("arguments", "optimizer", "scheduler", "microbatches", "rerun", "record", "rng")


def make_state() -> Any:
    """One optimizer with a loss scale, a schedule, a batch size that grows, and a rerun machine; all upstream's own."""
    from megatron.core import num_microbatches_calculator as microbatches
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.rerun_state_machine import (
        RerunMode,
        destroy_rerun_state_machine,
        initialize_rerun_state_machine,
    )
    from megatron.training import global_vars

    from megatron.hotswap.state.metadata import ARGUMENT_FIELDS, TrainerState

    global_vars.set_args(Namespace(**{name: 3 for name in ARGUMENT_FIELDS}))
    microbatches.unset_num_microbatches_calculator()
    microbatches.init_num_microbatches_calculator(
        0, micro_batch_size=2, data_parallel_size=2, step_batch_size_schedule="0:4 8:8 24:16"
    )
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    adam = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    adam.param_groups[0].update(step=7, wd_mult=1.0, lr_mult=1.0, max_lr=0.1, min_lr=0.01)
    scaler = DynamicGradScaler(65536.0, 1.0, 2.0, 0.5, 1000, 2)
    leaf = SimpleNamespace(optimizer=adam, grad_scaler=scaler, param_groups=adam.param_groups)
    scheduler = OptimizerParamScheduler(leaf, 0.0, 0.1, 0.01, 2, 100, "cosine", 0.0, 0.1, 100, "linear")
    state = TrainerState(model=[], optimizer=leaf, scheduler=scheduler, config=None)
    state.samples_digest, state.records = "00ff", ({"iteration": 3, "lm_loss": 0.1},)
    return state


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of nested dicts, lists and tuples; tensors and arrays are leaves, as bytes."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flattened(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and not all(isinstance(item, int) for item in value):
        for number, item in enumerate(value):
            yield from flattened(item, f"{path}[{number}]")
    elif isinstance(value, torch.Tensor):
        yield path, value.numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield path, value.tobytes()
    else:
        yield path, value


def other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "another" if value is None else f"{value} changed"


def seed_host_generators(seed: int) -> None:
    """Python's and NumPy's; of a pair of normal numbers both keep the second one, NumPy where ``seed`` is odd."""
    random.seed(seed)
    np.random.seed(seed)
    random.gauss()
    np.random.standard_normal(seed)


def change_everything(state: Any) -> None:
    """Give every field that training changes another value, in place."""
    from megatron.core import num_microbatches_calculator as microbatches
    from megatron.core import tensor_parallel
    from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
    from megatron.training import get_args

    from megatron.hotswap.state.metadata import _SCALARS

    machine = get_rerun_state_machine()
    for holder in (get_args(), state.scheduler, microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR, machine):
        for name, value in vars(holder).items():
            if isinstance(value, _SCALARS):
                setattr(holder, name, other(value))
    machine.mode, machine.state = RerunMode.DISABLED, RerunState.INITIAL_RUN
    machine.large_value_counts["loss"] = 5
    machine.max_values["loss"] = 2.5
    group = state.optimizer.optimizer.param_groups[0]
    for name, value in group.items():
        if name != "params":
            group[name] = other(value)
    group["only after the first step"] = 1
    scaler = state.optimizer.grad_scaler
    scaler._scale = scaler._scale / 2
    scaler._growth_tracker += 1
    scaler._hysteresis_tracker -= 1
    state.samples_digest, state.records = "0011", ({"iteration": 4, "lm_loss": 0.2},)
    seed_host_generators(12)
    torch.rand(1)
    tensor_parallel.get_cuda_rng_tracker().states_["model-parallel-rng"] = torch.get_rng_state()


def captured(state: Any, iteration: int = 3) -> dict[str, Any]:
    from megatron.hotswap.state import codec, metadata

    made: dict[str, Any] = codec.decode(codec.encode(metadata.capture(state, iteration, 30.0 * iteration)))
    return made


def set_up() -> Any:
    from megatron.hotswap import device

    device.install()
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 99)
    seed_host_generators(5)
    return make_state()


def fields_after(skip: str) -> tuple[set[str], set[str], set[str]]:
    """Paths of all fields; of those that the change reached; of those that the restore did not put back."""
    from megatron.hotswap.state import metadata

    state = set_up()
    saved = captured(state)
    before = dict(flattened(saved))
    change_everything(state)
    changed = dict(flattened(captured(state, iteration=4)))
    metadata.restore(state, saved, frozenset({skip}))
    if skip != "rng":
        metadata.restore_generators(state, saved)
    # The iteration and the flops of a capture are given to it: what the arguments hold is looked at by itself.
    from megatron.training import get_args

    again = captured(state)
    again["arguments"] |= {name: getattr(get_args(), name) for name in saved["arguments"]}
    after = dict(flattened(again))
    reached = {path for path in before if changed.get(path) != before[path]}
    lost = {path for path in before if after.get(path) != before[path]} | (set(after) - set(before))
    return set(before), reached, lost


def attributes_not_kept() -> dict[str, set[str]]:
    """Names of attributes that upstream's objects have and the metadata does not."""
    from megatron.core import num_microbatches_calculator as microbatches
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    state = set_up()
    saved = captured(state)
    rerun = set(saved["rerun"]["scalars"]) | set(saved["rerun"])
    scaler = {f"_{name}" for name in saved["optimizer"][0]["scaler"]}
    calculator = microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    return {
        "rerun": set(vars(get_rerun_state_machine())) - rerun,
        "scaler": set(vars(state.optimizer.grad_scaler)) - scaler,
        "scheduler": set(vars(state.scheduler)) - set(saved["scheduler"]),
        "batch size": set(vars(calculator)) - set(saved["microbatches"]),
    }


def test_f20_every_field_comes_back_rerun_state_and_loss_scale_included() -> None:
    fields, reached, lost = in_child(lambda: fields_after(skip="nothing"))
    assert fields - reached == CONSTANT, "not changed, so that its restore would show nothing"
    assert lost == set()
    for name in ("rerun.state", "rerun.mode", "rerun.scalars.current_iteration", "optimizer[0].groups[0].step"):
        assert name in fields
    assert {f"optimizer[0].scaler.{name}" for name in ("scale", "growth_tracker", "hysteresis_tracker")} <= fields
    assert {f"arguments.{name}" for name in ("consumed_train_samples", "skipped_train_samples")} <= fields
    assert {"microbatches.num_micro_batches", "scheduler.num_steps", "rng.tracker.model-parallel-rng"} <= fields


def test_f20_a_section_that_is_left_out_is_what_is_missing() -> None:
    for section, (fields, _, lost) in in_child(lambda: {name: fields_after(skip=name) for name in SECTIONS}).items():
        expected = {path for path in fields - CONSTANT if path.startswith(section)}
        assert lost & fields == expected, section


def test_f20_nothing_that_upstream_keeps_in_these_objects_is_forgotten() -> None:
    missing = in_child(attributes_not_kept)
    assert missing["rerun"] <= set(RERUN_NOT_KEPT)
    assert missing["scaler"] == SCALER_NOT_KEPT
    assert missing["scheduler"] == SCHEDULER_NOT_KEPT
    assert missing["batch size"] == BATCH_SIZE_NOT_KEPT
