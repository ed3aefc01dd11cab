"""Arguments of the tiny GPT job, for tests that really train."""

from __future__ import annotations

import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY_GPT = ROOT / "examples" / "tiny_gpt" / "args.txt"

#: bf16 with both overlaps and a LLaMA-like model: the hardest layout of parameters and optimizer state to move.
BF16_OVERLAPS: dict[str, str | int | float | bool] = {
    "bf16": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}


def tiny_gpt(**overrides: str | int | float | bool) -> list[str]:
    """The file's arguments with some replaced or added: ``tiny_gpt(train_iters=4, bf16=True, split=False)``.

    True is a flag without a value, False leaves the flag out.
    """
    words = shlex.split(TINY_GPT.read_text(encoding="utf-8"), comments=True)
    grouped: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flag = word
            grouped[flag] = []
        else:
            grouped[flag].append(word)
    for name, value in overrides.items():
        flag = "--" + name.replace("_", "-")
        if value is False:
            grouped.pop(flag, None)
        else:
            grouped[flag] = [] if value is True else [str(value)]
    return [word for flag, values in grouped.items() for word in (flag, *values)]
