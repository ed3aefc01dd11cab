"""Jobs with the real trainer: one preloaded process, one corpus, and the undisturbed runs to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deadpool_ext.cli.main import run as deadpool
from tests.jobs import Ended, Job, JobServer
from tests.megatron_args import BF16_OVERLAPS, tiny_gpt

ITERATIONS = 7

#: The two ways in which optimizer state is laid out, with what makes each hard to move.
VARIANTS: dict[str, dict[str, str | int | float | bool]] = {
    "fp32_dropout": {},
    "bf16_overlaps": BF16_OVERLAPS,
}


@pytest.fixture(scope="session")
def jobs() -> Iterator[JobServer]:
    """Runs jobs, one at a time."""
    server = JobServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small corpus made from the standard library's sources."""
    prefix = tmp_path_factory.mktemp("corpus") / "stdlib"
    assert deadpool(["data", "stdlib", "--output", str(prefix), "--limit-mb", "1"]) == 0
    return prefix


@pytest.fixture(scope="session")
def arguments(corpus: Path) -> Callable[..., list[str]]:
    """``arguments(variant, **overrides)``: the script's arguments, without ``--deadpool``."""

    def make(variant: str, **overrides: str | int | float | bool) -> list[str]:
        data = {"data_path": str(corpus), "tokenizer_type": "NullTokenizer", "vocab_size": 257}
        return tiny_gpt(**{"train_iters": ITERATIONS, **data, **VARIANTS[variant], **overrides})

    return make


@pytest.fixture(scope="session")
def undisturbed(
    jobs: JobServer, arguments: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Ended]:
    """``undisturbed(variant, nodes, ranks_per_node, **overrides)``: a protected run without a fault.

    Made once per set of arguments.
    """
    made: dict[tuple[int, int, tuple[str, ...]], Ended] = {}

    def get(variant: str, nodes: int = 4, ranks_per_node: int = 2, **overrides: str | int | float | bool) -> Ended:
        argv = arguments(variant, **overrides)
        key = (nodes, ranks_per_node, tuple(argv))
        if key not in made:
            run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
            job = Job(run_dir=run_dir, argv=[*argv, "--deadpool"], nodes=nodes, ranks_per_node=ranks_per_node)
            made[key] = jobs.run(job)
            assert made[key].code == 0, made[key].output
        return made[key]

    return get
