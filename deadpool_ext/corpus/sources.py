"""Where training text comes from: files the user names, or the Python standard library, in a fixed order."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from deadpool_ext.protocol.types import UsageError

#: Folders of the standard library that are left out: not library text, or different on every machine.
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "ensurepip"}
)


class CorpusError(UsageError):
    """The input is empty, unreadable or not text."""


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Python sources of the running interpreter's standard library, sorted by their path below ``root``.

    Tests and files generated for one machine are left out, so the same Python version gives the same text everywhere.
    Raises :class:`CorpusError` when there are none (a zipped or stripped library).
    """
    top = root if root is not None else Path(sysconfig.get_path("stdlib"))
    found = [
        path
        for path in top.rglob("*.py")
        if not _STDLIB_SKIPPED.intersection(path.relative_to(top).parts) and not path.name.startswith("_sysconfigdata")
    ]
    if not found:
        raise CorpusError(f"no Python sources below {top}")
    return sorted(found, key=lambda path: path.relative_to(top).as_posix())


def check_readable(files: Sequence[Path]) -> int:
    """Total size in bytes of ``files``, after making sure that each is a file that can be opened.

    Raises :class:`CorpusError` naming the first that is not.
    """
    total = 0
    for path in files:
        try:
            with path.open("rb"):
                total += path.stat().st_size
        except OSError as error:
            raise CorpusError(f"{path}: {error.strerror or error}") from error
    return total


def documents(files: Iterable[Path], limit_bytes: int | None = None) -> Iterator[str]:
    """The text of each non-empty file as one document, together at most ``limit_bytes`` of UTF-8.

    The document that crosses the limit is cut there, between two characters. Raises :class:`CorpusError` for a file
    that cannot be read or is not UTF-8, and at the end when there was no text at all.
    """
    left = limit_bytes
    empty = True
    for path in files:
        if left is not None and left <= 0:
            break
        try:
            raw = path.read_bytes()
            text = raw.decode("utf-8")
        except OSError as error:
            raise CorpusError(f"{path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise CorpusError(f"{path}: not UTF-8 text (byte {error.start})") from error
        if left is not None:
            if len(raw) > left:
                text = raw[:left].decode("utf-8", errors="ignore")
            left -= len(raw)
        if text:
            empty = False
            yield text
    if empty:
        raise CorpusError("the input holds no text")
