"""Whether this process can still use its device; and, for tests of failures, a device that it cannot."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WORDS = "CUDA error: an illegal memory access was encountered (injected)"
#: In messages of errors after which a process can do nothing more with its device, whoever raised them.
_MARKS = (
    "CUDA error",
    "CUDNN_STATUS",
    "CUBLAS_STATUS",
    "device-side assert",
    "uncorrectable ECC",
    "unhandled cuda error",
)


_broken = False


class _BrokenDevice(TorchDispatchMode):
    """Every operation fails from its entering on, as with a poisoned CUDA context."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(_WORDS)


def break_device() -> None:
    """From now on every tensor operation of the training thread fails as it does after a sticky CUDA error."""
    global _broken
    _broken = True
    if threading.current_thread() is threading.main_thread():
        stay_broken()


def stay_broken() -> None:
    """To be called now and then by the training thread: autograd ends modes that were entered in its hooks."""
    if _broken and torch._C._len_torch_dispatch_stack() == 0:
        _BrokenDevice().__enter__()


def is_device_error(error: BaseException) -> bool:
    """Whether an error says that the device, or this process's context on it, is broken."""
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MARKS)


def cause_of(error: BaseException) -> str:
    """What an exception that ends a worker is due to: ``device``, ``memory`` or ``script``."""
    if is_device_error(error) and "out of memory" not in str(error):
        return "device"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return "memory"
    return "script"


def probe_device() -> None:
    """Use the device and wait for the answer; raises what the device, or its driver, raises. Main thread.

    A few bytes and one kernel: milliseconds where all is well. After a sticky error every call fails, this one too.
    """
    stay_broken()
    probe = torch.ones(8, device=torch.cuda.current_device())
    total = float((probe + probe).sum().item())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if total != 16.0:
        raise RuntimeError(f"CUDA error: the device adds wrongly: 8 x 2 = {total}")
