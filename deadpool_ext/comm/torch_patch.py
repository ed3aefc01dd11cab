"""Making ``torch.distributed`` build every group on the replaceable backend, explicitly and undoably."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, HashStore, get_debug_level
from torch.distributed import distributed_c10d

from deadpool_ext.comm.group import BackendRequest, GroupSpec
from deadpool_ext.comm.registry import Communicators, Mode
from deadpool_ext.protocol.types import UsageError

BACKEND = "deadpool"
_DEVICES = ["cpu", "cuda"]


class TorchPatch:
    """Replaces three functions of ``torch.distributed`` while it is applied.

    * ``init_process_group``: the store is local, rank and world size are the registry's, the backend is ours.
    * ``_new_group_with_tag`` (below ``new_group``, ``new_subgroups`` and device meshes): any ``backend=`` becomes ours.
    * ``broadcast_object_list``: in solo mode the list stays as it is, since the sender's sizes cannot be known.

    Group names come from torch's own counter, so a process that builds its groups alone gets the same ones.
    """

    def __init__(self, communicators: Communicators) -> None:
        self._communicators = communicators
        self._request: BackendRequest | None = None
        self._description = ""  # of the group being made, by the one thread that makes groups
        self._undo: list[Callable[[], None]] = []

    def apply(self) -> None:
        """Patch. Raises ``UsageError`` where the environment asks torch to communicate while a group is made."""
        if self._undo:
            return
        if dist.is_initialized():
            raise UsageError("torch.distributed is initialized already; the backend must be in place before")
        if get_debug_level() == DebugLevel.DETAIL:
            raise UsageError("TORCH_DISTRIBUTED_DEBUG=DETAIL wraps each group in a second one that cannot be replaced")
        if os.environ.get("TORCH_DIST_INIT_BARRIER") == "1":
            raise UsageError("TORCH_DIST_INIT_BARRIER=1 makes groups wait on a store that is local here; unset it")
        self._register()
        original_init = distributed_c10d.init_process_group
        self._replace("init_process_group", self._init_process_group(original_init), dist, distributed_c10d)
        original_group = distributed_c10d._new_group_with_tag
        self._replace("_new_group_with_tag", self._new_group(original_group), distributed_c10d)
        original_broadcast = distributed_c10d.broadcast_object_list
        self._replace("broadcast_object_list", self._broadcast(original_broadcast), dist, distributed_c10d)
        atexit.register(self._communicators.close)  # before the interpreter takes things apart in its own order
        self._undo.append(lambda: atexit.unregister(self._communicators.close))

    def undo(self) -> None:
        """Put everything back. Existing groups keep working. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, name: str, replacement: Callable[..., Any], *modules: Any) -> None:
        for module in modules:
            original = getattr(module, name)
            setattr(module, name, replacement)
            self._undo.append(functools.partial(setattr, module, name, original))

    def _register(self) -> None:
        dist.Backend.register_backend(BACKEND, self._create, extended_api=True, devices=_DEVICES)

        def unregister() -> None:
            dist.Backend._plugins.pop(BACKEND.upper(), None)
            dist.Backend.backend_type_map.pop(BACKEND, None)
            dist.Backend.backend_capability.pop(BACKEND, None)
            if BACKEND in dist.Backend.backend_list:
                dist.Backend.backend_list.remove(BACKEND)
            if hasattr(dist.Backend, BACKEND.upper()):
                delattr(dist.Backend, BACKEND.upper())

        self._undo.append(unregister)

    def _create(self, options: Any, backend_options: Any) -> Any:
        """Called by torch for each group that this rank is a member of."""
        size = int(options.group_size)
        request = self._request or self._communicators.request(None)
        spec = GroupSpec(
            name=str(options.group_id),
            ranks=tuple(options.global_ranks_in_group) or tuple(range(size)),
            group_rank=int(options.group_rank),
            request=request,
            options=backend_options,
            description=self._description,
        )
        return self._communicators.create(spec, options.timeout.total_seconds())

    def _making[T](self, request: BackendRequest, make: Callable[[], T], description: str | None = None) -> T:
        self._request, self._description = request, description or ""
        try:
            return make()
        finally:
            self._request, self._description = None, ""

    def _init_process_group(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments
            ours = {"rank": self._communicators.rank, "world_size": self._communicators.world_size}
            for name, value in ours.items():
                if given.get(name, -1) not in {-1, value}:
                    raise UsageError(f"init_process_group: {name} {given[name]} differs from this seat's {value}")
            request = self._communicators.request(given.get("backend"))
            given.pop("init_method", None)
            given.update(ours, backend=request.torch_name, store=HashStore())
            self._making(request, lambda: original(*bound.args, **bound.kwargs))
            self._communicators.set_default_request(request)

        return init_process_group

    def _new_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def _new_group_with_tag(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            request = self._communicators.request(bound.arguments.get("backend"))
            bound.arguments["backend"] = request.torch_name
            description = bound.arguments.get("group_desc")
            return self._making(request, lambda: original(*bound.args, **bound.kwargs), description)

        return _new_group_with_tag

    def _broadcast(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def broadcast_object_list(*args: Any, **kwargs: Any) -> None:
            if self._communicators.mode is not Mode.SOLO:
                original(*args, **kwargs)

        return broadcast_object_list


def patch_torch(communicators: Communicators) -> TorchPatch:
    """Make and apply the patch; ``.undo()`` takes it back."""
    patch = TorchPatch(communicators)
    patch.apply()
    return patch
