"""The data cursor: upstream's data iterators are rewound in place, and every microbatch they yield is hashed.

The iterator objects that upstream's ``pretrain()`` holds keep their identity, so that evaluation after training sees
the rewound ones too. Datasets are kept; only samplers and loaders are rebuilt, which issues no collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.training import get_args
from megatron.training.training import cyclic_iter

from deadpool_ext.protocol.types import DeadpoolError

_SPLITS = ("train", "valid", "test")


class CursorError(DeadpoolError):
    """Upstream built its data iterators in a way that the cursor does not know."""


class SampleRecord:
    """Hash chain over the microbatches of finished iterations, plus those of the iteration under way."""

    def __init__(self) -> None:
        self._pending = hashlib.blake2b(digest_size=8)
        self._any = False

    def add(self, batch: Any) -> None:
        """Take in one microbatch: the bytes of its token and label tensors."""
        if isinstance(batch, dict):
            for key in ("tokens", "labels"):
                value = batch.get(key)
                if isinstance(value, torch.Tensor):
                    self._pending.update(value.contiguous().cpu().numpy().tobytes())
                    self._any = True

    def close(self, chain: str) -> str:
        """The chain value after this iteration; a rank that reads no data keeps the empty chain."""
        closed = hashlib.blake2b(bytes.fromhex(chain) + self._pending.digest(), digest_size=8).hexdigest()
        closed = closed if self._any else chain
        self.clear()
        return closed

    def clear(self) -> None:
        """Forget the iteration under way."""
        self._pending = hashlib.blake2b(digest_size=8)
        self._any = False


class _Watched:
    """An iterator that shows each item to ``seen`` before handing it on; ``before`` runs ahead of each fetch."""

    def __init__(self, inner: Iterator[Any], before: Callable[[], Any], seen: Callable[[Any], None]) -> None:
        self._inner = inner
        self._before = before
        self._seen = seen

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        with self._before():
            item = next(self._inner)
        self._seen(item)
        return item


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one virtual pipeline stage of this rank reads: a dataset and an iterator per split, None where it does not.

    ``datasets`` is empty where upstream built no loader.
    """

    datasets: tuple[Any, ...]
    iterators: tuple[Any, ...]


class DataCursor:
    """Rewinds the data iterators of a rank, three for each of its pipeline stages (absent ones stay absent)."""

    def __init__(self, fetching: Callable[[], Any]) -> None:
        """``fetching()`` returns a context manager around each fetch of training data (interruptible, fault point)."""
        self.samples = SampleRecord()
        self._fetching = fetching
        self._datasets: list[Any] = []  # of the stage that upstream is building
        self._stages: list[_Stage] = []
        self._build_loader: Callable[[Any, int], Any] | None = None

    def saw_loader(self, build: Callable[[Any, int], Any], dataset: Any) -> None:
        """Note a dataset that upstream builds a loader for (train, valid, test, in this order, stage by stage)."""
        self._build_loader = build
        self._datasets.append(dataset)

    def saw_iterators(self, iterators: tuple[Any, Any, Any]) -> None:
        """Note upstream's iterators for one stage, behind its loaders, and watch the training one."""
        datasets, self._datasets = tuple(self._datasets), []
        present = [iterator for iterator in iterators if iterator is not None]
        if any(isinstance(iterator, list) for iterator in present) or (datasets and len(datasets) != len(_SPLITS)):
            raise CursorError("several validation sets are not supported with --deadpool yet: use one")
        self._stages.append(_Stage(datasets, tuple(iterators)))
        if iterators[0] is not None:
            iterators[0].iterable = self._watch(iterators[0].iterable)

    def _watch(self, inner: Iterator[Any]) -> _Watched:
        return _Watched(inner, self._fetching, self.samples.add)

    def rewind(self) -> None:
        """Rebuild loaders at the consumed-sample counts in upstream's arguments; call before RNG is restored."""
        self.samples.clear()
        for stage in self._stages:
            self._rewind_stage(stage)

    def _rewind_stage(self, stage: _Stage) -> None:
        args = get_args()
        starts = (args.consumed_train_samples, args.consumed_valid_samples, 0)
        for number, (split, start, iterator) in enumerate(zip(_SPLITS, starts, stage.iterators, strict=True)):
            if iterator is None:
                continue
            if self._build_loader is None or args.dataloader_type not in ("single", "cyclic"):
                raise CursorError(f"cannot rebuild the {split} loader: upstream built it in an unknown way")
            loader = self._build_loader(stage.datasets[number], start)
            inner = iter(cyclic_iter(loader)) if args.dataloader_type == "cyclic" else iter(loader)
            iterator.iterable = self._watch(inner) if split == "train" else inner
            iterator.saved_microbatches = []
            iterator.replaying = False
            iterator.replay_pos = 0
