"""Writing a run directory: events and steps as JSON lines, final and status as whole files.

A full disk must not stop the training: a write that fails is reported once on stderr and counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from deadpool_ext.protocol.types import UsageError

EVENTS: Final = "events.jsonl"
STEPS: Final = "steps.jsonl"
FINAL: Final = "final.json"
STATUS: Final = "status.json"
CONTROL: Final = "control.json"
LOGS: Final = "logs"


def prepare_run_directory(path: Path) -> Path:
    """Make the directory, absolute. Raises UsageError unless it is new or empty: records of two runs never mix."""
    path = path.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UsageError(f"run directory {path} is not empty: name a new one with --run-dir")
        (path / LOGS).mkdir()
    except OSError as error:
        raise UsageError(f"run directory {path}: {error.strerror or error}") from error
    return path


@contextlib.contextmanager
def kept_if_usable(path: Path) -> Iterator[None]:
    """A start that is refused (UsageError) leaves nothing of the run directory that was made for it."""
    made = [place for place in (path, *path.parents) if not place.exists()]
    had_logs = (path / LOGS).exists()
    try:
        yield
    except UsageError:
        if not (path / EVENTS).exists():
            if not had_logs:
                shutil.rmtree(path / LOGS, ignore_errors=True)
            for place in made:
                with contextlib.suppress(OSError):  # not empty, or never made
                    place.rmdir()
        raise


class RunDirectory:
    """The files of one run. One writer, one thread; readers see whole lines and whole files."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self.failed_writes = 0
        self._events: TextIO | None = self._open(EVENTS)
        self._steps: TextIO | None = self._open(STEPS)

    def event(
        self,
        event: str,
        *,
        generation: int,
        node: str | None = None,
        rank: int | None = None,
        fields: Mapping[str, Any] | None = None,
        mono: float | None = None,
    ) -> dict[str, Any]:
        """Append an event; returns the record. ``mono`` (seconds) if it happened earlier: ``t`` moves along."""
        now, wall = time.monotonic(), time.time()
        mono = now if mono is None else mono
        record: dict[str, Any] = {"t": wall - (now - mono), "mono": mono, "event": event, "generation": generation}
        record |= {"node": node, "rank": rank, **(fields or {})}
        self._append(self._events, record)
        return record

    def step(self, record: Mapping[str, Any]) -> None:
        """Append a finished iteration."""
        self._append(self._steps, record)

    def final(self, content: Mapping[str, Any]) -> None:
        """Write final.json, on disk when this returns."""
        self._replace(FINAL, content, sync=True)

    def status(self, content: Mapping[str, Any]) -> None:
        """Replace status.json atomically."""
        self._replace(STATUS, content, sync=False)

    def control(self, host: str, port: int, secret: bytes) -> None:
        """Say where the coordinator of the running job can be reached, to whoever may read this user's files.

        The file holds the job's secret: it is made readable by its owner alone, and :meth:`close` removes it.
        """
        path = self.path / CONTROL
        try:
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump({"host": host, "port": port, "secret": secret.hex()}, file)
        except OSError as error:
            self._complain(error)

    def close(self) -> None:
        """Flush to disk and close."""
        (self.path / CONTROL).unlink(missing_ok=True)
        for file in (self._events, self._steps):
            if file is not None:
                try:
                    file.flush()
                    os.fsync(file.fileno())
                except OSError as error:
                    self._complain(error)
                file.close()
        self._events = self._steps = None

    def _open(self, name: str) -> TextIO | None:
        try:
            return open(self.path / name, "a", encoding="utf-8")
        except OSError as error:
            self._complain(error)
            return None

    def _append(self, file: TextIO | None, record: Mapping[str, Any]) -> None:
        if file is None:
            return
        try:
            file.write(json.dumps(record, default=str) + "\n")
            file.flush()
        except OSError as error:
            self._complain(error)

    def _replace(self, name: str, content: Mapping[str, Any], *, sync: bool) -> None:
        temporary = self.path / f".{name}.{os.getpid()}"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, default=str)
                file.write("\n")
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, self.path / name)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        self.failed_writes += 1
        if self.failed_writes == 1:
            print(f"deadpool: the run directory cannot be written ({error}); training goes on", file=sys.stderr)
