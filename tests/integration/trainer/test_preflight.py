"""Command lines as upstream's own parser and validation see them, before anything starts."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import warnings
from typing import Any

import pytest

from deadpool_ext.protocol.types import UsageError
from tests.isolated import in_child
from tests.megatron_args import ROOT, tiny_gpt

DATA: dict[str, Any] = {"mock_data": True, "split": False, "tokenizer_type": "NullTokenizer", "vocab_size": 255}


def command(*, deadpool: bool = True, **flags: Any) -> list[str]:
    return ["pretrain_gpt.py", *(["--deadpool"] if deadpool else []), *tiny_gpt(**(DATA | flags))]


# name: (argv, nodes, ranks per node)
ACCEPTED: dict[str, tuple[list[str], int, int]] = {
    "tiny": (command(), 4, 2),
    "unprotected": (command(deadpool=False), 1, 8),
    "unprotected without a sharded optimizer": (command(deadpool=False, use_distributed_optimizer=False), 1, 8),
    "other order": (command(use_tp_pp_dp_mapping=True), 2, 4),
    "without the script": (command()[1:], 4, 2),
    "by samples": (command(train_iters=False, train_samples=80, lr_warmup_iters=False), 4, 2),
    "more replicas": (command(pipeline_model_parallel_size=1), 4, 2),
}
# name: (argv, nodes, ranks per node, part of the line)
REFUSED: dict[str, tuple[list[str], int, int, str]] = {
    "unknown flag": (command(bogus=3), 4, 2, "unrecognized arguments: --bogus 3"),
    "bad value": (command(train_iters="x"), 4, 2, "argument --train-iters: invalid int value: 'x'"),
    "required": (command(micro_batch_size=False), 4, 2, "assert args.micro_batch_size is not None"),
    "layers": (command(num_layers=5), 4, 2, "upstream refuses these arguments: Number of layers should be divisible"),
    "heads": (command(num_attention_heads=3), 4, 2, "upstream refuses these arguments: "),
    "world size": (command(), 3, 2, "upstream refuses these arguments: world size (6) is not divisible"),
    "no gpu": (
        command(transformer_impl="transformer_engine"),
        4,
        2,
        "cannot work without a GPU: use --transformer-impl",
    ),
    "nccl": (command(deadpool=False, distributed_backend="nccl"), 4, 2, "cannot work without a GPU: use --distributed"),
    "not sharded": (
        command(use_distributed_optimizer=False),
        4,
        2,
        "not supported with --deadpool yet: add --use-dist",
    ),
    "experts": (command(num_experts=4), 4, 2, "(--num-experts) is not supported with --deadpool yet: train a dense"),
    "one replica": (command(), 2, 2, "a data-parallel size of 1 is not supported with --deadpool yet"),
    "one node": (command(), 1, 8, "seats 0, 1, 2, 3, 4, 5, 6, 7 have no data-parallel peer"),
    "peers on one node": (command(), 2, 4, "2 ranks per node on 4 nodes would do"),
    "transient limit": (command(deadpool_transient_limit=0), 4, 2, "--deadpool-transient-limit must be at least 1"),
    "other script": (command(sft=True, deadpool=False), 4, 2, "--sft is not for this script"),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Every question above, asked in one child that imports upstream once."""

    def ask() -> dict[str, Any]:
        warnings.simplefilter("ignore")  # upstream's, of which there are many
        from megatron.hotswap.preload import preload

        preload()
        from megatron.hotswap.preflight import inspect

        found: dict[str, Any] = {}
        questions = ACCEPTED | {name: given[:3] for name, given in REFUSED.items()}
        for name, (argv, nodes, ranks_per_node) in questions.items():
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    found[name] = inspect(argv, nodes, ranks_per_node)
                except UsageError as error:
                    found[name] = str(error)
        return found

    return in_child(ask, seconds=120)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(answers: dict[str, Any], name: str) -> None:
    answer = answers[name]
    assert isinstance(answer, dict), answer
    _, nodes, ranks_per_node = ACCEPTED[name]
    assert answer["world_size"] == nodes * ranks_per_node
    assert answer["protected"] == ("--deadpool" in ACCEPTED[name][0])
    assert sorted(rank for group in answer["dp_groups"] for rank in group) == list(range(answer["world_size"]))
    assert answer["layout"]["dp_groups"] == answer["dp_groups"]


def test_the_layout_is_upstreams(answers: dict[str, Any]) -> None:
    tiny = answers["tiny"]
    sizes = tiny["tensor_parallel"], tiny["pipeline_parallel"], tiny["data_parallel"]
    assert sizes == (2, 2, 2)
    assert tiny["dp_groups"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert answers["other order"]["dp_groups"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert answers["more replicas"]["dp_groups"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert answers["without the script"] == tiny


def test_the_length_of_the_job(answers: dict[str, Any]) -> None:
    assert (answers["tiny"]["train_iters"], answers["tiny"]["tokens_per_step"]) == (12, 8 * 64)
    assert answers["by samples"]["train_iters"] == 10


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(answers: dict[str, Any], name: str) -> None:
    answer = answers[name]
    assert isinstance(answer, str), answer
    assert REFUSED[name][3] in answer
    assert len(answer.splitlines()) == 1


def test_help_is_shown_with_our_group() -> None:
    # Upstream's own parser fails on --help: one of its texts has a percent sign too many.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "pretrain_gpt.py"), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "\ndeadpool:\n" in done.stdout and "--use-distributed-optimizer" in done.stdout
