"""NCCL communicators through torch's own classes.

Not executed on machines without a GPU: what is here follows torch's headers and bindings, and tests/gpu is where it is
to be proven first.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from deadpool_ext.comm.errors import CommunicatorError
from deadpool_ext.comm.group import GroupSpec

#: Torch's watchdog must not end the process when a communicator is aborted.
ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def make(store: Store, group: GroupSpec, *, timeout_s: float) -> Backend:
    """A communicator of ``group``; NCCL itself connects at the first operation. Raises ``CommunicatorError``."""
    if not dist.is_nccl_available():
        raise CommunicatorError(f"group '{group.name}' asks for nccl, which this torch was built without")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = group.options if group.options is not None else dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.global_ranks_in_group = list(group.ranks)
    options.group_name = group.name
    return dist.ProcessGroupNCCL(store, group.group_rank, group.size, options)


def abort_all(backends: list[Backend], *, timeout_s: float) -> tuple[float, bool]:
    """Abort all of this process's communicators inside one group call, on a thread of its own.

    Returns seconds and whether it ended within ``timeout_s``; if it did not, the process should be killed.
    """
    if not backends:
        return 0.0, True
    start = time.monotonic()

    def body() -> None:
        first: Any = backends[0]
        first._group_start()
        for backend in backends:
            backend.abort()
        first._group_end()

    thread = threading.Thread(target=body, name="deadpool-nccl-abort", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return time.monotonic() - start, not thread.is_alive()
