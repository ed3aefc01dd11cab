"""Patches are verified before any is applied, and can all be taken back."""

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron.hotswap.patches.registry import Patch, PatchError, apply, resolve, source_digest, verify

MODULE = "upstream_stand_in"


def step(x: int) -> int:
    """Stand-in for an upstream function."""
    return x + 1


def evaluate(x: int) -> int:
    """Another stand-in."""
    return x * 2


@pytest.fixture(autouse=True)
def upstream() -> Iterator[types.ModuleType]:
    module = types.ModuleType(MODULE)
    module.step, module.evaluate = step, evaluate  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]


def entry(name: str, original: Callable[..., Any], **changes: Any) -> Patch:
    fields = {
        "target": f"{MODULE}:{name}",
        "kind": "wrap",
        "versions": ("1",),
        "digest": source_digest(original),
        "why": "test",
        "until": "never",
        "make": lambda original, runtime: lambda x: original(x) + runtime,
    }
    return Patch(**(fields | changes))


def test_applied_in_order_and_reverted(upstream: Any) -> None:
    applied = apply([entry("step", step), entry("evaluate", evaluate)], 100, "1")
    assert (upstream.step(1), upstream.evaluate(2)) == (102, 104)
    applied.revert()
    assert upstream.step is step and upstream.evaluate is evaluate


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"digest": "0" * 16}, "source digest"),
        ({"versions": ("2",)}, "written for 2, installed 1"),
        ({"target": f"{MODULE}:gone"}, "does not exist"),
        ({"target": "no_such_module:step"}, "does not exist"),
    ],
)
def test_a_mismatch_names_the_target_and_changes_nothing(upstream: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PatchError, match=said):
        apply([entry("evaluate", evaluate), entry("step", step, **changes)], 100, "1")
    assert upstream.evaluate is evaluate


def test_two_patches_of_one_target_are_refused() -> None:
    with pytest.raises(PatchError, match="same target"):
        apply([entry("step", step), entry("step", step)], 100, "1")


def test_the_table_matches_the_installed_megatron() -> None:
    from megatron.hotswap.patches.table import PATCHES

    verify(PATCHES, "0.19.2")
    assert len(PATCHES) <= 10
    for patch in PATCHES:
        assert patch.why and patch.until and resolve(patch.target)[2].__name__ == patch.target.rsplit(":")[-1]
