"""Patches are verified before any is applied, and can all be taken back."""

import queue
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


def test_the_tables_match_the_installed_megatron() -> None:
    from megatron.hotswap.patches.base import BASE_PATCHES
    from megatron.hotswap.patches.table import PATCHES

    everything = (*BASE_PATCHES, *PATCHES)
    verify(everything, "0.19.2")
    assert len({patch.target for patch in everything}) == len(everything) <= 13
    for patch in everything:
        name = patch.target.rpartition(":")[2].rpartition(".")[2]
        assert patch.why and patch.until
        assert not patch.digest or resolve(patch.target)[2].__name__ == name


@pytest.mark.parametrize("save_in_process", [True, False])
def test_the_base_patches_can_be_verified_again_and_taken_back(save_in_process: bool) -> None:
    from megatron.core.datasets import utils
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron.hotswap.patches.base import BASE_PATCHES, Situation

    applied = apply(BASE_PATCHES, Situation(save_in_process=save_in_process), "0.19.2")
    try:
        verify(BASE_PATCHES, "0.19.2")
        utils.compile_helpers()  # upstream's would run make, and exit
        assert isinstance(filesystem_async._results_queue, queue.Queue) is save_in_process
    finally:
        applied.revert()
    assert filesystem_async._results_queue is None
