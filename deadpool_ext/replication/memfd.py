"""Anonymous shared memory: sized, allocated and mapped up front, so that running out of it is an error at creation.

A memfd has no name in any file system: it disappears with the last process that holds it, SIGKILL included, and the
size of /dev/shm does not matter. Other processes of the same user open it as ``/proc/PID/fd/N``.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from deadpool_ext.replication.errors import ArenaMemoryError

_NO_SPACE = {errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EAGAIN, errno.EDQUOT}


def _number(path: Path) -> int | None:
    """The integer in a control file; None where it is absent or says ``max``."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file_bytes(stat: Path) -> int:
    """File cache that a cgroup can drop under pressure (``memory.stat``)."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _cgroup_headroom(root: Path, cgroups: str) -> int | None:
    """Bytes left below the tightest memory limit of this process's cgroup and its ancestors (v2 and v1)."""
    tightest: int | None = None
    for line in cgroups.splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            base, limit_name, used_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, used_name = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None:
                left = max(0, limit - used + _inactive_file_bytes(group / "memory.stat"))
                tightest = left if tightest is None else min(tightest, left)
            if group == base:
                break
    return tightest


def available_bytes() -> int:
    """Host memory a new segment may take: the kernel's estimate, or what a cgroup limit leaves, if that is less."""
    available = 2**63 - 1
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        cgroups = Path("/proc/self/cgroup").read_text()
    except OSError:
        return available
    headroom = _cgroup_headroom(Path("/sys/fs/cgroup"), cgroups)
    return available if headroom is None else min(available, headroom)


def create(name: str, nbytes: int, *, available: int | None = None, advice: str) -> tuple[int, mmap.mmap]:
    """A zeroed memfd of ``nbytes`` with every page allocated, and a shared mapping of it.

    ``available`` overrides :func:`available_bytes`. Raises :class:`ArenaMemoryError` (with ``advice`` on what to
    change) where memory, a file size limit or the address space does not suffice; nothing is left behind then.
    """
    have = available_bytes() if available is None else available
    if nbytes > have:
        # Asked first: past the limit of a cgroup the kernel would kill a process rather than refuse.
        raise ArenaMemoryError(name, nbytes, have, advice)
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return fd, mmap.mmap(fd, nbytes)
    except OSError as error:
        os.close(fd)
        if error.errno in _NO_SPACE:
            raise ArenaMemoryError(name, nbytes, have, f"{advice} ({error.strerror})") from error
        raise


def attach(path: str) -> mmap.mmap:
    """Map an existing memfd, usually ``/proc/PID/fd/N``. Raises ``OSError`` where its owner is gone."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
