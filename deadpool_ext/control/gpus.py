"""What NVIDIA's driver says about the GPUs of this node, through NVML; nothing of it touches a GPU's memory."""

from __future__ import annotations

from typing import Any, Final

#: XIDs after which a GPU needs a reset or is gone: its manual calls for both.
FATAL_XIDS: Final = frozenset({48, 62, 64, 74, 79, 92, 95, 109, 119, 120})


class Gpus:
    """The GPUs of a node. ``nvml`` is the module ``pynvml``, initialised; None: there is none that works."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._xids: dict[int, int] = {}  # GPU -> the last fatal one: it stays until the GPU is reset
        if nvml is None:
            return
        try:
            self._events = nvml.nvmlEventSetCreate()
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError:
            self._events = None  # not every driver or container reports events

    @classmethod
    def find(cls) -> Gpus:
        """The GPUs of this machine; none where the module, or a driver, is missing."""
        try:
            import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError:
            return cls(None)
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return cls(None)
        return cls(pynvml)

    def problem(self) -> tuple[bool, str] | None:
        """(fatal, what) of the first GPU that is not well, or None."""
        nvml = self._nvml
        if nvml is None:
            return None
        warning = self._read_events()
        for index, xid in self._xids.items():
            return True, f"GPU {index}: XID {xid}"
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceGetMemoryInfo(handle)  # a GPU that fell off the bus does not answer
                if (found := self._memory_problem(handle)) is not None:
                    return True, f"GPU {index}: {found}"
        except nvml.NVMLError as error:
            return True, f"the GPU does not answer: {error}"
        return (False, warning) if warning else None

    def _memory_problem(self, handle: Any) -> str | None:
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetRemappedRows(handle)[3]:
                return "a memory row cannot be remapped"
            count = nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        except nvml.NVMLError:  # not every GPU has error correction, or remaps rows
            return None
        return f"{count} uncorrectable memory errors" if count else None

    def _read_events(self) -> str:
        """Take in critical errors since the last call; returns words for one that is not fatal."""
        nvml, warning = self._nvml, ""
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # a timeout: there are no more
                break
            index, xid = int(nvml.nvmlDeviceGetIndex(event.device)), int(event.eventData)
            if xid in FATAL_XIDS:
                self._xids[index] = xid
            else:
                warning = f"GPU {index}: XID {xid}"
        return warning
