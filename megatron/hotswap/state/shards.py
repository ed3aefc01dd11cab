"""The optimizer shard of a rank as a few contiguous pieces that can be copied while the next step computes.

The truth of a rank is its optimizer shard: fp32 main parameters and both Adam moments. For bf16 models the main
parameters are tensors of the optimizer's own and are re-pointed, with the moments, to views of one flat buffer per
optimizer. For fp32 models the main parameters *are* views of DDP's parameter buffer; they are listed as they are and
never copied twice. Parameters that no optimizer holds (frozen ones) and module buffers are listed as themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deadpool_ext import _native
from deadpool_ext.protocol.types import DeadpoolError

_ALIGN_BYTES = 256  # so that every piece of a flat buffer starts on a boundary that DMA engines like


class ShardError(DeadpoolError):
    """Optimizer state of a shape that enumeration does not cover; refused rather than saved in part."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the shard. ``key`` is ``main``, ``exp_avg``, ``exp_avg_sq``, ``frozen`` or ``buffer``."""

    name: str
    key: str
    tensor: torch.Tensor  # contiguous; a view of a flat buffer or of DDP's parameter buffer


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """The distributed optimizers inside upstream's (possibly chained) optimizer, stubs left out."""
    leaves = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    return [leaf for leaf in leaves if not getattr(leaf, "is_stub_optimizer", False)]


def _names(model: list[Any]) -> dict[int, str]:
    return {id(p): f"{i}.{name}" for i, chunk in enumerate(model) for name, p in chunk.named_parameters()}


def _shard_names(leaf: Any, names: dict[int, str]) -> dict[int, str]:
    """Name of every shard parameter of one optimizer, from the model parameter that it is a part of."""
    pairs = [
        *zip(leaf.model_float16_groups, leaf.shard_fp32_from_float16_groups, strict=True),
        *zip(leaf.model_fp32_groups, leaf.shard_fp32_groups, strict=True),
    ]
    return {id(s): names[id(m)] for models, shards in pairs for m, s in zip(models, shards, strict=True)}


class FlatShards:
    """Enumerates, re-points and copies the state of one rank; made once, at ``train()`` entry, after any load."""

    def __init__(self, model: list[Any], optimizer: Any) -> None:
        """Create Adam's moments where absent (zeros, as its first step would), then flatten."""
        self.flats: list[torch.Tensor] = []
        self.entries: list[Entry] = []
        names = _names(model)
        held: set[int] = set()
        for leaf in leaf_optimizers(optimizer):
            if leaf.init_state_fn is not None:
                leaf.init_state_fn(leaf.optimizer, leaf.config)
            self._flatten(leaf, _shard_names(leaf, names))
            held |= {id(p) for group in (*leaf.model_float16_groups, *leaf.model_fp32_groups) for p in group}
        for i, chunk in enumerate(model):
            for name, parameter in chunk.named_parameters():
                if not parameter.requires_grad and id(parameter) not in held:
                    self.entries.append(Entry(f"{i}.{name}", "frozen", parameter.data))
            for name, buffer in chunk.named_buffers():
                if buffer.numel() and buffer.is_contiguous():
                    self.entries.append(Entry(f"{i}.{name}", "buffer", buffer))

    def _flatten(self, leaf: Any, names: dict[int, str]) -> None:
        own = {id(p) for group in leaf.shard_fp32_from_float16_groups for p in group}
        parameters = [p for group in leaf.optimizer.param_groups for p in group["params"]]
        planned: list[tuple[torch.Tensor, str | None, int]] = []
        total = 0
        for parameter in parameters:
            state = leaf.optimizer.state[parameter]
            keys = sorted(key for key, value in state.items() if isinstance(value, torch.Tensor))
            if keys != ["exp_avg", "exp_avg_sq"]:
                raise ShardError(
                    f"optimizer state of {names[id(parameter)]} is {keys}, expected exp_avg and exp_avg_sq"
                )
            for key in ([None] if id(parameter) in own else []) + keys:
                value = parameter if key is None else state[key]
                if value.dtype != torch.float32 or not value.is_contiguous():
                    raise ShardError(
                        f"{key or 'main'} of {names[id(parameter)]} is {value.dtype}, expected contiguous fp32"
                    )
                planned.append((parameter, key, total))
                total += -(-value.numel() * 4 // _ALIGN_BYTES) * _ALIGN_BYTES // 4
            if id(parameter) not in own:
                self.entries.append(Entry(names[id(parameter)], "main", parameter.detach()))
        device = parameters[0].device if parameters else torch.device("cpu")
        flat = torch.zeros(total, dtype=torch.float32, device=device)
        for parameter, key, offset in planned:
            value = parameter.data if key is None else leaf.optimizer.state[parameter][key]
            view = flat[offset : offset + value.numel()].view(value.shape)
            view.copy_(value)
            if key is None:
                parameter.data = view
            else:
                leaf.optimizer.state[parameter][key] = view
            self.entries.append(Entry(names[id(parameter)], key or "main", view))
        if total:
            self.flats.append(flat)

    def pieces(self) -> Iterator[torch.Tensor]:
        """Contiguous tensors that together are the shard, in the order in which a slot holds them."""
        yield from self.flats
        flat_storages = {flat.untyped_storage().data_ptr() for flat in self.flats}
        for entry in self.entries:
            if entry.tensor.untyped_storage().data_ptr() not in flat_storages:
                yield entry.tensor

    def sources(self) -> list[tuple[int, int]]:
        """(address, bytes) of every piece, for the copy engine."""
        return [(piece.data_ptr(), piece.numel() * piece.element_size()) for piece in self.pieces() if piece.numel()]

    @property
    def nbytes(self) -> int:
        """Bytes of the shard in a slot."""
        return sum(nbytes for _, nbytes in self.sources())

    @property
    def layout_digest(self) -> str:
        """16 hex digits over name, key, dtype and shape of every entry and the sizes of the pieces."""
        lines = [f"{e.name} {e.key} {e.tensor.dtype} {tuple(e.tensor.shape)}" for e in self.entries]
        lines += [str(nbytes) for _, nbytes in self.sources()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @torch.no_grad()
    def install(self, raw: memoryview, skip: frozenset[str] = frozenset()) -> int:
        """Copy a slot's shard into the live tensors; returns bytes. ``skip`` (keys) exists for tests of the tests."""
        kept = [(e.tensor, e.tensor.clone()) for e in self.entries if e.key in skip]
        offset = 0
        for piece in self.pieces():
            nbytes = piece.numel() * piece.element_size()
            if nbytes and piece.device.type == "cpu":
                _native.copy_crc32c(piece.data_ptr(), _native.address_of(raw[offset : offset + nbytes]), nbytes)
            elif nbytes:
                host = torch.frombuffer(raw, dtype=torch.uint8, count=nbytes, offset=offset)
                piece.view(-1).view(torch.uint8).copy_(host)
            offset += nbytes
        for tensor, value in kept:
            tensor.copy_(value)
        return offset

    def differences(self, raw: memoryview) -> list[str]:
        """Names of entries whose bytes are not those of a slot's shard. Buffers are left out: upstream changes some of
        them within a step, before the optimizer's."""
        found = []
        offset = 0
        inside: dict[int, list[Entry]] = {}
        for entry in self.entries:
            inside.setdefault(entry.tensor.untyped_storage().data_ptr(), []).append(entry)
        for piece in self.pieces():
            nbytes = piece.numel() * piece.element_size()
            here = host_bytes(piece)
            there = np.frombuffer(raw, dtype=np.uint8, count=nbytes, offset=offset)
            if nbytes and not np.array_equal(here, there):
                for entry in inside[piece.untyped_storage().data_ptr()]:
                    start = entry.tensor.data_ptr() - piece.data_ptr()
                    part = slice(start, start + entry.tensor.numel() * entry.tensor.element_size())
                    within = start >= 0 and part.stop <= nbytes and entry.key != "buffer"
                    if within and not np.array_equal(here[part], there[part]):
                        found.append(f"{entry.name} {entry.key}")
            offset += nbytes
        return found

    def digest(self) -> str:
        """SHA-256 over every entry's bytes: the optimizer state part of ``final.json``."""
        total = hashlib.sha256()
        for entry in self.entries:
            total.update(f"{entry.name} {entry.key} {entry.tensor.dtype} {tuple(entry.tensor.shape)}".encode())
            total.update(entry.tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        return total.hexdigest()


def host_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A contiguous tensor's bytes, in host memory; no copy where it is there already."""
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return array


def parameters_digest(model: list[Any]) -> str:
    """SHA-256 over names, shapes and bytes of all model parameters of this rank."""
    total = hashlib.sha256()
    for i, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            total.update(f"{i}.{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            total.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()
