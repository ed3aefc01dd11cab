"""What ``deadpool data`` writes is what upstream reads, tokenizer included, without a network."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TEXTS = ["def first():\n    return 'é'\n" * 20, "second = 2\n" * 20]

READER = """
import dataclasses, json, sys, types
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.config.training_config import TokenizerConfig
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
values = {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(TokenizerConfig)}
values |= {flag[2:].replace("-", "_"): value for flag, value in given.items()}
values |= {"rank": 0, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2}
values["vocab_size"] = int(given["--vocab-size"]) if "--vocab-size" in given else None
tokenizer = build_tokenizer(types.SimpleNamespace(**values))
dataset = IndexedDataset(given["--data-path"])
rows = [dataset[i].tolist() for i in range(len(dataset))]
texts = [tokenizer.detokenize(row[:-1]) for row in rows] if "--tokenizer-model" in given else None
print("RESULT " + json.dumps({"rows": rows, "eod": tokenizer.eod, "size": tokenizer.vocab_size, "texts": texts}))
"""


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_upstream_reads_it(tmp_path: Path, tokenizer: str) -> None:
    files = []
    for number, text in enumerate(TEXTS):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(text, encoding="utf-8")
    options = ["--vocab-size", "300"] if tokenizer == "bpe" else []
    prefix = str(tmp_path / "corpus")
    # The reader's path is this process's: the checkout first, wherever the tests were started.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}
    made = subprocess.run(
        [sys.executable, "-m", "deadpool_ext.cli.main", "data", "text", *map(str, files),
         "--output", prefix, "--tokenizer", tokenizer, *options],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert len(made.stderr.splitlines()) == 1, "nothing but the summary on standard error"
    read = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READER, *shlex.split(made.stdout)],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert read.returncode == 0, read.stderr
    result = json.loads(read.stdout.split("RESULT ", 1)[1])
    assert [row[-1] for row in result["rows"]] == [result["eod"]] * len(TEXTS)
    assert all(0 <= token < result["size"] for row in result["rows"] for token in row)
    if tokenizer == "byte":
        assert result["rows"] == [[*text.encode(), 256] for text in TEXTS]
        assert result["size"] == 257
    else:
        assert result["texts"] == TEXTS
