"""Upstream's trainer on the CPU's device layer: 8 ranks (TP2 PP2 DP2) on real text, compared bit for bit.

All jobs run in one process that imports once and forks the ranks of one job after the other.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import pytest

from deadpool_ext.protocol.types import UsageError
from megatron.hotswap import device
from tests.isolated import in_child
from tests.megatron_args import BF16_OVERLAPS, ROOT, tiny_gpt
from tests.oracle.recorder import read

pytestmark = pytest.mark.skipif(not device.needed(), reason="there is a CUDA device: nothing stands in for it")

RANKS = 8
LAST = 6
SAVED = 3
TEXTS = "[a-c]*.py"  # of the standard library: always there, real text, documents enough for three splits
FP32 = {"train_iters": LAST, "eval_iters": 1, "eval_interval": 4, "split": "80,10,10", "ckpt_format": "torch_dist"}
LLAMA: dict[str, Any] = (
    FP32
    | BF16_OVERLAPS
    | {
        "disable_bias_linear": True,
        "group_query_attention": True,
        "num_query_groups": 2,
    }
)
# What examples/tiny_gpt says about the machine: here the defaults have to do it.
MACHINE = (
    "transformer_impl",
    "attention_backend",
    "distributed_backend",
    "no_gradient_accumulation_fusion",
    "no_bias_dropout_fusion",
    "no_bias_gelu_fusion",
    "no_masked_softmax_fusion",
    "no_persist_layer_norm",
    "no_rope_fusion",
    "num_workers",
)
# Learned positions would start from other values with sequence parallelism: upstream warms up with draws in between.
PLAIN: dict[str, Any] = FP32 | {
    "train_iters": 3,
    "lr_warmup_iters": 1,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "position_embedding_type": "rope",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Flags that name a small corpus and its tokenizer."""
    library = Path(sysconfig.get_path("stdlib"))
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    done = subprocess.run(
        [sys.executable, "-m", "deadpool_ext.cli.main", "data", "text", *map(str, sorted(library.glob(TEXTS))),
         "--output", str(prefix), "--tokenizer", "byte"],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    flags = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    return flags | {"data_cache_path": str(prefix.parent / "cache")}


@pytest.fixture(scope="module")
def runs(corpus: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Records of all jobs by name."""
    base = tmp_path_factory.mktemp("runs")

    def saving(name: str) -> dict[str, Any]:
        return {"save": str(base / f"{name}-checkpoints"), "save_interval": SAVED}

    def resuming(name: str) -> dict[str, Any]:
        return {"load": str(base / f"{name}-checkpoints"), "ckpt_step": SAVED}

    by_default = dict.fromkeys(MACHINE, False)
    jobs: dict[str, dict[str, Any]] = {
        "fp32": FP32 | saving("fp32"),
        "fp32 again, by default flags and with loader processes": FP32 | by_default | {"num_workers": 1},
        "fp32 resumed": FP32 | resuming("fp32"),
        "llama": LLAMA | saving("llama"),
        "llama resumed": LLAMA | resuming("llama"),
        "plain": PLAIN,
        "plain with sequence parallelism": PLAIN | {"sequence_parallel": True},
    }
    written = [
        {"out": str(base / name), "ranks": RANKS, "argv": tiny_gpt(**(corpus | flags))} for name, flags in jobs.items()
    ]
    (base / "jobs.json").write_text(json.dumps(written))
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "tests/oracle/record_run.py",
            "--jobs",
            base / "jobs.json",
            "--seconds",
            "120",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: read(base / name) for name in jobs}


def steps(run: dict[str, Any], rank: int, after: int = 0) -> list[dict[str, Any]]:
    return [record for record in run["iterations"][rank] if record["iteration"] > after]


def assert_same(left: dict[str, Any], right: dict[str, Any], after: int = 0) -> None:
    for rank in range(RANKS):
        assert steps(left, rank, after) == steps(right, rank, after), f"rank {rank}"
        for what in ("parameters", "optimizer"):
            assert left["final"][rank][what] == right["final"][rank][what], f"{what} of rank {rank}"


def losses(run: dict[str, Any]) -> list[float]:
    return [float.fromhex(record["lm_loss"]) for record in steps(run, RANKS - 1)]


@pytest.mark.parametrize("name", ["fp32", "llama"])
def test_it_trains(runs: dict[str, Any], name: str) -> None:
    run = runs[name]
    for rank in range(RANKS):
        assert [record["iteration"] for record in steps(run, rank)] == list(range(1, LAST + 1))
        assert [record["consumed_samples"] for record in steps(run, rank)] == [8 * n for n in range(1, LAST + 1)]
    found = losses(run)
    assert found[-1] < found[0] - 0.1
    # Losses are known at the end of the pipeline, gradient norms everywhere and everywhere the same.
    assert all(record["lm_loss"] is None for record in steps(run, 0))
    assert len({tuple(record["grad_norm"] for record in steps(run, rank)) for rank in range(RANKS)}) == 1


def test_two_runs_are_equal(runs: dict[str, Any]) -> None:
    # Neither saving nor the number of loader processes nor who gives the CPU's flags makes a difference.
    assert_same(runs["fp32"], runs["fp32 again, by default flags and with loader processes"])


@pytest.mark.parametrize("name", ["fp32", "llama"])
def test_a_resumed_run_equals_the_uninterrupted_one(runs: dict[str, Any], name: str) -> None:
    resumed = runs[f"{name} resumed"]
    assert [record["iteration"] for record in steps(resumed, 0)] == list(range(SAVED + 1, LAST + 1))
    assert_same(runs[name], resumed, after=SAVED)


def test_parameters_agree_over_the_data_parallel_group(runs: dict[str, Any]) -> None:
    for run in runs.values():
        for one, other in ((0, 2), (1, 3), (4, 6), (5, 7)):
            assert run["final"][one]["parameters"] == run["final"][other]["parameters"]
            assert run["final"][one]["optimizer"] != run["final"][other]["optimizer"]


def test_sequence_parallelism_gives_the_same_losses(runs: dict[str, Any]) -> None:
    assert losses(runs["plain with sequence parallelism"]) == pytest.approx(losses(runs["plain"]), rel=1e-5)
    norms = [
        [float.fromhex(record["grad_norm"]) for record in steps(runs[name], 0)]
        for name in ("plain", "plain with sequence parallelism")
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_without_protection_nothing_of_the_runtime_is_loaded(runs: dict[str, Any]) -> None:
    allowed = {
        "deadpool_ext",
        "deadpool_ext.protocol",
        "deadpool_ext.protocol.types",
        "megatron.hotswap",
        "megatron.hotswap.arguments",
        "megatron.hotswap.patches",
        "megatron.hotswap.patches.base",
        "megatron.hotswap.patches.registry",
        "megatron.hotswap.preload",
        "megatron.hotswap.refusals",
        "megatron.hotswap.versions",
    }
    for run in runs.values():
        for rank in range(RANKS):
            loaded = {
                name
                for name in run["final"][rank]["modules"]
                if not name.startswith(("megatron.hotswap.device", "megatron.hotswap.gpt"))
            }
            assert loaded <= allowed


def test_a_split_without_text_is_an_error_and_not_a_loop() -> None:
    def refused() -> str:
        warnings.simplefilter("ignore")  # upstream's, of which there are many
        from types import SimpleNamespace

        from megatron.core.datasets.utils import Split

        from megatron.hotswap.gpt.corpus import GPTDataset

        dataset = object.__new__(GPTDataset)
        dataset.config = SimpleNamespace(sequence_length=64, add_extra_token_to_sequence=True)
        dataset.index_split, dataset.dataset_path, dataset.num_samples = Split.valid, "/some/text", 8
        assert dataset._get_num_epochs(100) == 6
        try:
            dataset._get_num_epochs(0)
        except UsageError as error:
            return str(error)
        return ""

    expected = "the valid split of /some/text holds no text: give it a larger share in --split, or 0"
    assert in_child(refused) == expected
