"""Asking the script's side: answers, refusals, failures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from deadpool_ext.control.preflight import PreflightError, parse_preflight, run_preflight
from deadpool_ext.protocol.types import UsageError

LAYOUT = {"tp": 2, "pp": 1, "dp": 2, "dp_groups": [[0, 2], [1, 3]]}


def test_an_answer_becomes_a_layout() -> None:
    answer = parse_preflight({"layout": LAYOUT, "train_iters": 20, "warnings": ["slow"]}, 2, 2)
    assert (answer.layout.world_size, answer.layout.ranks_per_node) == (4, 2)
    assert answer.layout.dp_groups == ((0, 2), (1, 3))
    assert (answer.train_iters, answer.tokens_per_step, answer.warnings) == (20, None, ("slow",))
    assert answer.protected


def test_a_layout_that_does_not_fill_the_seats_is_refused() -> None:
    with pytest.raises(UsageError, match="3 nodes of 2 ranks make 6 ranks"):
        parse_preflight({"layout": LAYOUT}, 3, 2)


@pytest.mark.parametrize("content", [{}, {"layout": {"tp": 1}}, {"layout": LAYOUT | {"dp": "x"}}])
def test_an_answer_without_a_layout_is_an_error(content: dict[str, Any]) -> None:
    with pytest.raises(PreflightError):
        parse_preflight(content, 2, 2)


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (
            "from deadpool_ext.protocol.types import UsageError\nraise UsageError('no such\\nflag')",
            UsageError,
            "no such flag",
        ),
        ("import argparse\nargparse.ArgumentParser(prog='x').error('bad flag')", UsageError, "x: error: bad flag"),
        ("raise ValueError('broken')", PreflightError, "ValueError: broken"),
        ("import os\nos._exit(3)", PreflightError, "failed; see"),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: type[Exception], message: str
) -> None:
    lines = "\n".join(f"    {line}" for line in source.splitlines())
    (tmp_path / "asked.py").write_text(f"def inspect(argv, nodes, ranks):\n{lines}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(kind, match=message) as caught:
        run_preflight("asked:inspect", ("x",), 2, 2, tmp_path / "log")
    assert len(str(caught.value).splitlines()) == 1
