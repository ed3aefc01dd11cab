"""The one way in which upstream code is changed: verified entries, applied explicitly, all or none.

An entry names its target, the upstream versions and the digest of the upstream source it was written against, why it
exists and when it can go. :func:`verify` checks every entry before :func:`apply` touches the first one, so that an
unexpected upstream is one clear line and not a half-patched trainer.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from deadpool_ext.protocol.types import DeadpoolError


class PatchError(DeadpoolError):
    """An upstream function is not the one that a patch was written against."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One change to upstream.

    ``target`` is ``package.module:attribute.path``; ``make(original, runtime)`` returns what takes its place.
    ``digest`` is :func:`source_digest` of the upstream source, or empty for a target without Python source.
    """

    target: str
    kind: Literal["wrap", "replace", "hook"]
    versions: tuple[str, ...]
    digest: str
    why: str
    until: str
    make: Callable[[Callable[..., Any], Any], Callable[..., Any]]


def source_digest(function: Callable[..., Any]) -> str:
    """First 16 hex digits of the SHA-256 of a function's dedented source text."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def resolve(target: str) -> tuple[Any, str, Callable[..., Any]]:
    """Return (owner object, attribute name, current value) of ``module:path``; raises :class:`PatchError` if absent."""
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name, getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise PatchError(f"patch target {target} does not exist in the installed Megatron: {error}") from error


def verify(patches: Iterable[Patch], version: str) -> None:
    """Check that every target is the source its patch was written against.

    Raises :class:`PatchError` naming all that are not.
    """
    wrong = []
    for patch in patches:
        _, _, original = resolve(patch.target)
        if version not in patch.versions:
            wrong.append(f"{patch.target} (written for {', '.join(patch.versions)}, installed {version})")
        elif patch.digest and source_digest(original) != patch.digest:
            wrong.append(f"{patch.target} (source digest {source_digest(original)}, expected {patch.digest})")
    if wrong:
        raise PatchError("the installed Megatron is not the one Deadpool was written against: " + "; ".join(wrong))


class Applied:
    """Patches in force; :meth:`revert` puts the originals back (last first)."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        self.targets: list[str] = []

    def add(self, patch: Patch, runtime: Any) -> None:
        """Put one patch in force."""
        owner, name, original = resolve(patch.target)
        setattr(owner, name, patch.make(original, runtime))
        self._undo.append((owner, name, original))
        self.targets.append(patch.target)

    def revert(self) -> None:
        """Put every original back."""
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)
        self.targets.clear()


def apply(patches: Iterable[Patch], runtime: Any, version: str) -> Applied:
    """Verify all of ``patches``, then apply them in order. ``runtime`` is handed to each ``make``."""
    entries = list(patches)
    targets = [patch.target for patch in entries]
    doubled = {target for target in targets if targets.count(target) > 1}
    if doubled:
        raise PatchError(f"two patches claim the same target: {', '.join(sorted(doubled))}")
    verify(entries, version)
    applied = Applied()
    for patch in entries:
        applied.add(patch, runtime)
    return applied
