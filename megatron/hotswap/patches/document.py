"""The patches as Markdown, for docs/patches.md."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.hotswap.patches.base import BASE_PATCHES
from megatron.hotswap.patches.registry import Patch
from megatron.hotswap.patches.table import PATCHES


def base_table() -> str:
    """One line per patch of every run."""
    return _table(BASE_PATCHES)


def protected_table() -> str:
    """One line per patch of protected runs."""
    return _table(PATCHES)


def _table(patches: Iterable[Patch]) -> str:
    lines = ["| target | kind | versions | digest | why | until |", "|---|---|---|---|---|---|"]
    for patch in patches:
        module, _, name = patch.target.partition(":")
        digest = f"`{patch.digest}`" if patch.digest else "a value, no source"
        cells = (f"`{name}` of `{module}`", patch.kind, ", ".join(patch.versions), digest, patch.why, patch.until)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(base_table(), protected_table(), sep="\n\n")
