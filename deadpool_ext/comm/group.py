"""What identifies one process group, and what its creator asked for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from deadpool_ext.protocol.types import UsageError

_KNOWN = {"gloo", "nccl"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendRequest:
    """The communicators of a group: one per device type, as ``{"cpu": "gloo", "cuda": "nccl"}``."""

    by_device: tuple[tuple[str, str], ...]

    @property
    def has_nccl(self) -> bool:
        """Whether accelerator tensors go through NCCL."""
        return ("cuda", "nccl") in self.by_device

    @property
    def has_gloo(self) -> bool:
        """Whether there is a gloo communicator (which also takes accelerator tensors when there is no NCCL one)."""
        return ("cpu", "gloo") in self.by_device

    @property
    def torch_name(self) -> str:
        """The backend string that makes torch give this group the same device types as upstream would."""
        return "deadpool" if self.has_gloo else "cuda:deadpool"


def parse_backend(requested: str | None, *, accelerator: bool, default: BackendRequest | None = None) -> BackendRequest:
    """The request behind a ``backend=`` argument of torch.

    ``None`` (and ``"deadpool"``, which torch passes on for it) means ``default``. Without an accelerator everything is
    gloo on the host, whatever was asked for, so that the same script runs on a laptop. Raises ``UsageError`` for
    backends that cannot be replaced in place.
    """
    text = str(requested).lower() if requested else "undefined"
    if text in {"undefined", "deadpool", "cuda:deadpool"}:
        if default is not None:
            return default
        text = "cpu:gloo,cuda:nccl"
    names = {part.split(":")[-1].strip() for part in text.split(",")}
    if unknown := names - _KNOWN:
        raise UsageError(
            f"process group backend {', '.join(sorted(unknown))} cannot be replaced in place; use gloo or nccl"
        )
    if not accelerator or names == {"gloo"}:
        return BackendRequest(by_device=(("cpu", "gloo"),))
    if names == {"nccl"}:
        return BackendRequest(by_device=(("cuda", "nccl"),))
    return BackendRequest(by_device=(("cpu", "gloo"), ("cuda", "nccl")))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """One group as this rank sees it. ``ranks`` are global, in group order; ``options`` are NCCL's, or None."""

    name: str
    ranks: tuple[int, ...]
    group_rank: int
    request: BackendRequest
    options: Any = field(default=None, compare=False)
    description: str = field(default="", compare=False)  # what its creator calls it

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def shown(self) -> str:
        """A name for people, the same on every member and no other group's."""
        return f"{self.description} {self.name}" if self.description else self.name

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key that is the same on every rank, so that connecting group after group cannot deadlock.

        Torch numbers groups in the order in which all ranks ask for them, members or not; groups made with local
        synchronization are named by a hash of their ranks instead and come last.
        """
        return (0, int(self.name), "") if self.name.isdecimal() else (1, 0, self.name)

    @property
    def digest(self) -> str:
        """Eight hex digits over name, members and communicators, for comparing what two ranks built."""
        text = f"{self.name}|{self.ranks}|{self.request.by_device}"
        return hashlib.blake2s(text.encode(), digest_size=4).hexdigest()
