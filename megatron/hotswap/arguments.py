"""Deadpool's own arguments, and one-line errors for everybody's."""

from __future__ import annotations

import argparse
import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Never

from deadpool_ext.protocol.types import UsageError
from megatron.hotswap import refusals

# Set, to anything, in the environment of a process that a Deadpool agent forked to fill a seat.
WORKER_ENVIRONMENT = "DEADPOOL_WORKER"

# Flags of upstream's parser that belong to other entry scripts of upstream's.
OTHER_SCRIPTS = {
    "perform_rl_step": "--perform-rl-step",
    "sft": "--sft",
    "fim_data": "--fim-data",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "logits_load_dir": "--logits-load-dir",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "vision_pretraining": "--vision-pretraining",
}

ExtraArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def requested(argv: list[str]) -> bool:
    """Whether the command line asks for protection: ``--deadpool`` or any ``--deadpool-*``."""
    return any(word == "--deadpool" or word.startswith("--deadpool-") for word in argv)


def in_worker() -> bool:
    """Whether this process is one that a Deadpool agent started."""
    return WORKER_ENVIRONMENT in os.environ


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the argument group ``deadpool`` to upstream's parser."""
    group = parser.add_argument_group(
        title="deadpool", description="Survive the loss of nodes. Needs `deadpool local` or `deadpool launch`."
    )
    group.add_argument(
        "--deadpool",
        action="store_true",
        help="Protect the job: copies of every rank's state are kept on a peer node while steps compute, and a spare "
        "takes over from a lost node. Default: off, and then nothing of Deadpool is loaded.",
    )
    group.add_argument(
        "--deadpool-snapshot-params",
        action="store_true",
        help="Not supported yet, and refused. Reserved for keeping copies of the model parameters too (parameter count "
        "times the training dtype's bytes more per rank and version). Default: off; they are rebuilt from the "
        "optimizer's fp32 copy.",
    )
    group.add_argument(
        "--deadpool-health-check",
        metavar="COMMAND",
        default="",
        help="Run by a shell on every node: at its start, every minute, and after a failure there; DEADPOOL_NODE names "
        "the node. An exit code other than 0, or more than 5 seconds, means that the node must not train: a spare "
        "takes over. Default: none (memory, disk and, where the driver tells, GPUs are checked anyway).",
    )
    group.add_argument(
        "--deadpool-transient-limit",
        type=int,
        metavar="N",
        default=3,
        help="The N-th death of a worker on one node within ten minutes counts against the node: a spare takes over, "
        "if there is one. Exceptions of the training script do not count. Default: 3.",
    )
    group.add_argument(
        "--deadpool-check-params-every",
        type=int,
        metavar="N",
        default=0,
        help="Compare the model parameters over the data-parallel groups after every N-th iteration, and each rank's "
        "optimizer state with its sealed copy; one pass over both, before the next optimizer step. A difference names "
        "the rank that deviates. Default: 0, never.",
    )
    group.add_argument(
        "--deadpool-on-mismatch",
        choices=("warn", "swap"),
        default="warn",
        help="What to do about such a difference. warn: an event says so, and training goes on. swap: the job goes "
        "back to the last iteration known to be right, and a spare replaces the node that deviates. Default: warn.",
    )
    group.add_argument(
        "--deadpool-swap-slower-than",
        type=float,
        metavar="FACTOR",
        default=0.0,
        help="Let a warm spare take the seats of a node that needs more than FACTOR times as long as others for its "
        "own part of ten steps in a row, waiting not counted; between two steps, at most once in ten minutes. Default: "
        "0, never: a node that is 1.5 times slower is only reported.",
    )
    return parser


#: Arguments that the coordinator and the agents go by, and their names there.
POLICY = {
    "deadpool_health_check": "health_check",
    "deadpool_transient_limit": "transient_limit",
    "deadpool_on_mismatch": "on_mismatch",
    "deadpool_swap_slower_than": "swap_slower_than",
}


def policy(args: argparse.Namespace) -> dict[str, Any]:
    """What the ``--deadpool-*`` arguments ask of coordinator and agents; what was not given is left out."""
    values = {name: getattr(args, argument, None) for argument, name in POLICY.items()}
    return {name: value for name, value in values.items() if value not in (None, "", 0)}


def provide(extra: ExtraArguments | None = None) -> ExtraArguments:
    """What upstream's parser takes as ``extra_args_provider``: ours, the CPU's defaults, then ``extra``.

    Errors of the parser, and flags that cannot work here, become :class:`UsageError` instead of some thousand lines
    of usage or an assertion deep in upstream.
    """

    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        from megatron.hotswap.device import defaults, installed

        parser = add_arguments(parser)
        if installed():
            defaults.set_defaults(parser)
        if extra is not None:
            parser = extra(parser)
        parse = parser.parse_args

        def parse_and_check(*args: Any, **kwargs: Any) -> argparse.Namespace:
            parsed: argparse.Namespace = parse(*args, **kwargs)
            if parsed.deadpool_snapshot_params:
                parsed.deadpool = True
            for name, flag in OTHER_SCRIPTS.items():
                if getattr(parsed, name, None):
                    raise UsageError(f"{flag} is not for this script: use upstream's own entry script for it")
            if installed():
                defaults.check(parsed)
            if parsed.deadpool_check_params_every < 0:
                raise UsageError("--deadpool-check-params-every must be 0 (never) or a number of iterations")
            if parsed.deadpool_transient_limit < 1:
                raise UsageError("--deadpool-transient-limit must be at least 1 (1: the first death replaces the node)")
            if parsed.deadpool_swap_slower_than != 0 and not parsed.deadpool_swap_slower_than > 1:
                raise UsageError("--deadpool-swap-slower-than must be more than 1 (1.3: a third slower), or 0 (never)")
            if parsed.deadpool:
                refusals.check(parsed)
            return parsed

        parser.formatter_class = HelpFormatter
        parser.error = _raise_usage_error  # type: ignore[method-assign]
        parser.parse_args = parse_and_check  # type: ignore[method-assign,assignment]
        return parser

    return add


class HelpFormatter(argparse.HelpFormatter):
    """Shows a help text with a stray percent sign as it is; upstream has one, and its ``--help`` fails on it."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


def _raise_usage_error(message: str) -> Never:
    raise UsageError(message)


@contextlib.contextmanager
def refused_by_upstream() -> Iterator[None]:
    """Turn what upstream's validation raises on a user's mistake into a :class:`UsageError` of one line.

    Upstream says no by assertions, often without a text: then the line is the assertion itself.
    """
    try:
        yield
    except (AssertionError, ValueError, TypeError, RuntimeError, OSError, ImportError, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise  # --help
        text = " ".join(str(error).split())
        if not text or isinstance(error, SystemExit):
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{frame.line} ({Path(frame.filename).name}:{frame.lineno})"
        raise UsageError(f"upstream refuses these arguments: {text}") from error
