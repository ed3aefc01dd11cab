"""What a command line amounts to, before anything is started: parsed and validated by upstream, set up by nobody."""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from deadpool_ext.protocol.ring import Unprotected, replica_map
from deadpool_ext.protocol.types import Layout, UsageError
from megatron.hotswap import arguments, device, refusals, versions


def inspect(argv: list[str], nodes: int, ranks_per_node: int) -> dict[str, Any]:
    """Describe the job that ``argv`` (the script, then its arguments) makes on ``nodes`` x ``ranks_per_node`` ranks.

    The answer can go through JSON: ``world_size``, ``tensor_parallel``, ``pipeline_parallel``, ``data_parallel``,
    ``dp_groups`` (lists of ranks, each in the order of upstream's group), the same five as ``layout`` with the keys
    ``tp pp dp dp_groups``, ``train_iters``, ``tokens_per_step``, ``checkpoint`` (directory or empty), ``warnings``,
    ``protected`` (whether the arguments ask for it), ``policy`` (what they ask of coordinator and agents). Raises
    :class:`UsageError`, one line, for what upstream or Deadpool refuses.

    Parsing may ask the GPU for its properties and leaves traces in upstream: call it in a process that ends after.
    """
    versions.check()
    device.install()
    words = argv[1:] if argv and not argv[0].startswith("-") else argv
    with _seat_of_rank_0(["pretrain_gpt.py", *words], nodes * ranks_per_node, ranks_per_node):
        args = _validated()
    protected = arguments.requested(words)
    layout = layout_of(args, ranks_per_node)
    if protected:
        refusals.check_data_parallel(layout.data_parallel)
        peers = replica_map(layout)
        if isinstance(peers, Unprotected):
            raise UsageError(f"--deadpool cannot protect this layout: {peers.reason}")
    groups = [list(group) for group in layout.dp_groups]
    return {
        "world_size": layout.world_size,
        "tensor_parallel": layout.tensor_parallel,
        "pipeline_parallel": layout.pipeline_parallel,
        "data_parallel": layout.data_parallel,
        "dp_groups": groups,
        "layout": {
            "tp": layout.tensor_parallel,
            "pp": layout.pipeline_parallel,
            "dp": layout.data_parallel,
            "dp_groups": groups,
        },
        "train_iters": _train_iterations(args),
        "tokens_per_step": args.global_batch_size * args.seq_length if args.seq_length else None,
        "checkpoint": args.save or args.load or "",
        "warnings": [],
        "protected": protected,
        "policy": arguments.policy(args),
    }


def layout_of(args: Namespace, ranks_per_node: int) -> Layout:
    """Where upstream will put the ranks, for validated arguments; the data-parallel groups are its own."""
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(
        tp=args.tensor_model_parallel_size,
        ep=1,
        dp=args.data_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
    return Layout(
        world_size=args.world_size,
        ranks_per_node=ranks_per_node,
        tensor_parallel=args.tensor_model_parallel_size,
        pipeline_parallel=args.pipeline_model_parallel_size,
        data_parallel=args.data_parallel_size,
        # The distributed optimizer shards over data and context parallelism together.
        dp_groups=tuple(tuple(group) for group in generator.get_ranks("dp-cp")),
    )


def _validated() -> Namespace:
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpointing import load_args_from_checkpoint

    with arguments.refused_by_upstream():
        args = parse_args(arguments.provide())
        if args.yaml_cfg is not None:
            raise UsageError("--yaml-cfg is not supported by Deadpool's launchers yet: give the arguments as flags")
        if args.use_checkpoint_args:
            load_args_from_checkpoint(args)
        validate_args(args)
        core_transformer_config_from_args(args)  # the model's own checks
    assert isinstance(args, Namespace)
    return args


def _train_iterations(args: Namespace) -> int | None:
    if args.train_iters is not None:
        return int(args.train_iters)
    return args.train_samples // args.global_batch_size if args.train_samples else None


@contextlib.contextmanager
def _seat_of_rank_0(argv: list[str], world_size: int, ranks_per_node: int) -> Iterator[None]:
    """``sys.argv`` and the rank variables of the first process of the job, for a while."""
    seat = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
    }
    before, before_argv = {name: os.environ.get(name) for name in seat}, sys.argv
    os.environ.update(seat)
    sys.argv = argv
    try:
        yield
    finally:
        sys.argv = before_argv
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
