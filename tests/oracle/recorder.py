"""Exact records of upstream's trainer: every iteration's numbers, and digests of what training leaves behind."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import torch


def hexed(value: Any) -> str | None:
    """``float.hex`` of a number or one-element tensor; None stays None."""
    return None if value is None else float(value).hex()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 over the bytes of ``tensors`` in order."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def parameter_digest(model: list[Any]) -> str:
    """SHA-256 over chunk number, name, dtype, shape and bytes of all parameters of a rank, as ``final.json`` has it."""
    sha = hashlib.sha256()
    for number, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            sha.update(f"{number}.{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            sha.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def optimizer_digest(optimizer: Any) -> str:
    """Digest of a rank's optimizer state: main parameters, their state tensors by name, the groups' step counts."""
    sha = hashlib.sha256()
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            sha.update(str(group.get("step")).encode())
            for p in group["params"]:
                state = sorted(part.optimizer.state[p].items())
                sha.update(digest([p, *(value for _, value in state if torch.is_tensor(value))]).encode())
    return sha.hexdigest()


class Recorder:
    """Writes ``rank<r>.jsonl``, a line an iteration, and ``rank<r>.final.json`` into ``directory``.

    It wraps two functions of upstream's trainer and changes nothing that they see.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._lines: TextIO | None = None

    def attach(self) -> None:
        """Wrap ``training_log`` and ``train``; to be called once, before ``pretrain``."""
        from megatron.training import training

        log, train = training.training_log, training.train

        def recording_log(*given: Any, **named: Any) -> Any:
            losses, _, lr, iteration, scale, _, skipped, norm = given[:8]
            self._iteration(losses, lr, iteration, scale, skipped, norm)
            return log(*given, **named)

        def recording_train(forward_step: Any, model: Any, optimizer: Any, *rest: Any, **named: Any) -> Any:
            result = train(forward_step, model, optimizer, *rest, **named)
            self._final(model, optimizer)
            return result

        training.training_log, training.train = recording_log, recording_train

    def _iteration(self, losses: Any, lr: Any, iteration: int, scale: Any, skipped: Any, norm: Any) -> None:
        from megatron.training import get_args

        record = {
            "iteration": iteration,
            "lm_loss": hexed(losses["lm loss"]) if losses else None,
            "grad_norm": hexed(norm),
            "lr": hexed(lr),
            "loss_scale": hexed(scale),
            "skipped": int(skipped),
            "consumed_samples": get_args().consumed_train_samples,
        }
        if self._lines is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lines = (self._directory / f"rank{self._rank}.jsonl").open("w", buffering=1)
        self._lines.write(json.dumps(record) + "\n")

    def _final(self, model: Any, optimizer: Any) -> None:
        final = {
            "parameters": parameter_digest(model),
            "optimizer": optimizer_digest(optimizer),
            # Which of our own modules such a run loads at all.
            "modules": sorted(name for name in sys.modules if name.startswith(("megatron.hotswap", "deadpool_ext"))),
        }
        (self._directory / f"rank{self._rank}.final.json").write_text(json.dumps(final))


def read(directory: Path) -> dict[str, Any]:
    """Everything recorded in ``directory``: ``{"iterations": {rank: [...]}, "final": {rank: {...}}}``, rank as int."""
    iterations = {
        _rank(path): [json.loads(line) for line in path.read_text().splitlines()]
        for path in directory.glob("rank*.jsonl")
    }
    final = {_rank(path): json.loads(path.read_text()) for path in directory.glob("rank*.final.json")}
    return {"iterations": iterations, "final": final}


def _rank(path: Path) -> int:
    return int(path.name.removeprefix("rank").split(".")[0])
