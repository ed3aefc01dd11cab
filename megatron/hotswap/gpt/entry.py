"""From the command line to upstream's ``pretrain``."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from deadpool_ext.protocol.types import UsageError
from megatron.hotswap import arguments, versions
from megatron.hotswap.arguments import ExtraArguments
from megatron.hotswap.patches.registry import PatchError


def main() -> int:
    """Train as ``sys.argv`` says; returns the process's exit code. A user's error is one line on stderr and 2."""
    try:
        versions.check()
        if arguments.requested(sys.argv[1:]):
            _train_protected()
        else:
            launch()
    except (UsageError, PatchError) as error:
        print(f"pretrain_gpt.py: {error}", file=sys.stderr)
        return 2
    return 0


def _train_protected() -> None:
    if not arguments.in_worker():
        raise UsageError(
            "--deadpool needs a launcher: `deadpool local ... -- pretrain_gpt.py ...` on one machine, "
            "`deadpool launch ... -- pretrain_gpt.py ...` once per node of a cluster"
        )
    from megatron.hotswap import runtime

    runtime.protect(launch)


def launch(extra_args_provider: ExtraArguments | None = None) -> None:
    """Parse ``sys.argv`` with upstream's parser and run upstream's ``pretrain`` on GPT, unchanged.

    Takes the seat that the environment names (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Where torch
    sees no CUDA device the CPU stands in. Raises :class:`UsageError` for arguments that cannot be.
    """
    # Not at the top: what is missing or too old has to be found, and said, before it is imported.
    from megatron.hotswap import device

    device.install()

    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.training import pretrain

    from megatron.hotswap.gpt.datasets import train_valid_test_datasets
    from megatron.hotswap.gpt.step import forward_step
    from megatron.hotswap.patches import base

    args = parse(extra_args_provider)
    with arguments.refused_by_upstream():
        config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    one_writer = (device.installed() or arguments.requested(sys.argv[1:])) and not args.async_save
    base.apply_once(base.Situation(save_in_process=one_writer))
    pretrain(config, train_valid_test_datasets, ModelType.encoder_or_decoder, forward_step)


def parse(extra_args_provider: ExtraArguments | None = None) -> Namespace:
    """Upstream's arguments, validated and made global, with ours among them.

    Upstream validates by assertions; those of its argument modules become a :class:`UsageError`.
    """
    from megatron.training.arguments import parse_and_validate_args

    with arguments.refused_by_upstream():
        args: Any = parse_and_validate_args(arguments.provide(extra_args_provider))
    assert isinstance(args, Namespace)
    return args
