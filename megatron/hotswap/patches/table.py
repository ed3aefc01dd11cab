"""What a protected run changes in upstream, one entry a change. Applied by ``megatron.hotswap.runtime`` only.

What every run changes is in :mod:`megatron.hotswap.patches.base`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.training import get_args

from megatron.hotswap.loop.worker import ResilientWorker
from megatron.hotswap.newcomer import preset_flags, replay_set_up
from megatron.hotswap.patches.registry import Patch

_TRAINING = "megatron.training.training"
_VERSIONS = ("0.19.2",)
Function = Callable[..., Any]


def _train(original: Function, worker: ResilientWorker) -> Function:
    @wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        return worker.train(original, args, kwargs)

    return train


def _training_log(original: Function, worker: ResilientWorker) -> Function:
    @wraps(original)
    def training_log(
        loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, loss_scale: Any,
        report_memory_flag: Any, skipped_iter: int, grad_norm: Any, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        # Before upstream's own logging, which divides the loss in place.
        assert worker.keeper is not None
        fields = {
            "consumed_samples": get_args().consumed_train_samples,
            "learning_rate": learning_rate,
            "loss_scale": loss_scale,
            "skipped": skipped_iter,
        }
        worker.keeper.record(iteration, loss_dict, grad_norm, fields)
        return original(
            loss_dict, total_loss_dict, learning_rate, iteration, loss_scale,
            report_memory_flag, skipped_iter, grad_norm, *args, **kwargs,
        )  # fmt: skip

    return training_log


def _checkpoint_and_decide_exit(original: Function, worker: ResilientWorker) -> Function:
    @wraps(original)
    def checkpoint_and_decide_exit(
        model: Any, optimizer: Any, scheduler: Any, iteration: int, flops: float, *args: Any, **kwargs: Any
    ) -> Any:
        # After a save of this iteration: a failure during the save computes the iteration again and saves again.
        leave = original(model, optimizer, scheduler, iteration, flops, *args, **kwargs)
        assert worker.keeper is not None
        worker.keeper.capture(iteration, flops)
        return leave

    return checkpoint_and_decide_exit


def _region_after_train(original: Function, worker: ResilientWorker, phase: str, iteration_at: int) -> Function:
    """``iteration_at``: position of the iteration among the arguments."""

    @wraps(original)
    def region(*args: Any, **kwargs: Any) -> Any:
        def body() -> Any:
            # Within train() the forward step announces evaluation.
            with worker.places.at(phase, args[iteration_at]):
                if phase == "save" or worker.training_over:
                    worker.faults.reach(phase, args[iteration_at])
                return original(*args, **kwargs)

        return worker.next_region(body) if worker.training_over else body()

    return region


def _evaluate(original: Function, worker: ResilientWorker) -> Function:
    return _region_after_train(original, worker, "eval", 4)


def _save(original: Function, worker: ResilientWorker) -> Function:
    return _region_after_train(original, worker, "save", 0)


def _print_datetime(original: Function, worker: ResilientWorker) -> Function:
    @wraps(original)
    def print_datetime(*args: Any, **kwargs: Any) -> Any:
        # A newcomer that comes after train() walks through what the others have behind them: it must not wait there.
        if worker.state is None or worker.region >= worker.joined_at:
            return original(*args, **kwargs)
        return None

    return print_datetime


def _load_checkpoint(original: Function, worker: ResilientWorker) -> Function:
    @wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if worker.session.solo:
            return 0, 0  # iteration, floating point operations: overwritten by the restore
        worker.loading = True
        try:
            return original(*args, **kwargs)
        finally:
            worker.loading = False

    return load_checkpoint


def _build_loader(original: Function, worker: ResilientWorker) -> Function:
    @wraps(original)
    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        worker.cursor.saw_loader(original, dataset)
        return original(dataset, consumed_samples)

    return build_pretraining_data_loader


def _build_iterators(original: Function, worker: ResilientWorker) -> Function:
    @wraps(original)
    def build_train_valid_test_data_iterators(*args: Any, **kwargs: Any) -> Any:
        preset_flags(worker)
        iterators = original(*args, **kwargs)
        worker.cursor.saw_iterators(iterators)
        return iterators

    return build_train_valid_test_data_iterators


def _entry(name: str, digest: str, why: str, until: str, make: Callable[[Function, Any], Function]) -> Patch:
    return Patch(
        target=f"{_TRAINING}:{name}", kind="wrap", versions=_VERSIONS, digest=digest, why=why, until=until, make=make
    )


PATCHES = (
    _entry(
        "train", "3c2299658ae7928b",
        "runs as a region that is left by an exception and entered again after recovery",
        "upstream offers a wrapper around its training loop", _train,
    ),
    _entry(
        "training_log", "5e34a182d566e325",
        "the only place that sees loss, grad norm and learning rate of an iteration before they are averaged",
        "upstream offers a per-iteration callback with these values", _training_log,
    ),
    _entry(
        "checkpoint_and_decide_exit", "a581d0350f89e3d5",
        "the end of an iteration, where upstream has finished changing counters, schedule and RNG",
        "upstream offers an end-of-iteration callback", _checkpoint_and_decide_exit,
    ),
    _entry(
        "evaluate_and_print_results", "699dfbe69cf22ec4",
        "evaluation after training is a region of its own",
        "upstream's tail of pretrain() can be resumed", _evaluate,
    ),
    _entry(
        "save_checkpoint_and_time", "f72b7873e1709b5e",
        "the save after training is a region of its own",
        "upstream's tail of pretrain() can be resumed", _save,
    ),
    _entry(
        "print_datetime", "2134ead899ac1bfc",
        "has a barrier between the regions, which a newcomer that joins in a later one must pass alone",
        "upstream's tail of pretrain() can be resumed", _print_datetime,
    ),
    _entry(
        "load_checkpoint", "4f03d48a79382b8c",
        "a newcomer reads no weights from disk: its state comes from a replica",
        "upstream's set-up takes a flag to skip loading", _load_checkpoint,
    ),
    _entry(
        "build_pretraining_data_loader", "1f53bc68dccca32d",
        "keeps the datasets, from which iterators are rebuilt at the restored position",
        "upstream's iterators can be rewound", _build_loader,
    ),
    _entry(
        "build_train_valid_test_data_iterators", "d12ed278f953cc10",
        "keeps upstream's iterator objects, which are rewound in place, and tells a newcomer what there is to do",
        "upstream's iterators can be rewound", _build_iterators,
    ),
    Patch(
        target="torch.distributed:all_gather_object", kind="wrap", versions=_VERSIONS, digest="df42d97f87f94cbe",
        why="upstream's set-up decides parameter groups by it; a newcomer, alone, is told what the others had said",
        until="upstream's set-up decides parameter groups without communication", make=replay_set_up,
    ),
)  # fmt: skip
