"""``deadpool compare``: every way two runs can differ is found and said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deadpool_ext.cli.main import run

LOSSES = [5.5, 4.25, 4.0, 3.875]


def line(iteration: int, loss: float, generation: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "generation": generation,
        "lm_loss": loss,
        "lm_loss_hex": loss.hex(),
        "grad_norm": loss / 2,
        "grad_norm_hex": (loss / 2).hex(),
        "step_seconds": 0.1 * generation,
        **more,
    }


def undisturbed() -> list[dict[str, Any]]:
    return [line(i, loss) for i, loss in enumerate(LOSSES, start=1)]


def disturbed() -> list[dict[str, Any]]:
    steps = undisturbed()
    return [*steps[:3], line(3, LOSSES[2], generation=1), line(4, LOSSES[3], generation=1)]


def digests(**changes: dict[str, str]) -> dict[str, Any]:
    seats = [{"rank": r, "node": "n0", "digests": {"parameters": f"p{r}", "optimizer": f"o{r}"}} for r in range(2)]
    for name, changed in changes.items():
        seats[int(name.removeprefix("seat"))]["digests"] = changed
    return {"iterations": len(LOSSES), "seats": seats}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    for name, steps in (("a", undisturbed()), ("b", disturbed())):
        write(tmp_path / name, steps, digests())
    return tmp_path / "a", tmp_path / "b"


def write(directory: Path, steps: list[dict[str, Any]] | str, final: dict[str, Any] | str | None) -> None:
    directory.mkdir(exist_ok=True)
    text = steps if isinstance(steps, str) else "".join(json.dumps(step) + "\n" for step in steps)
    (directory / "steps.jsonl").write_text(text)
    if final is not None:
        (directory / "final.json").write_text(final if isinstance(final, str) else json.dumps(final))


def compare(runs: tuple[Path, Path]) -> int:
    return run(["compare", str(runs[0]), str(runs[1])])


def test_a_replay_that_agrees_is_identical(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(runs) == 0
    assert capsys.readouterr().out == (
        "identical: losses and gradient norms of 4 iterations (0 and 1 replayed), "
        "4 digests of the final state of 2 seats\n"
    )


@pytest.mark.parametrize(
    ("steps", "final", "said"),
    [
        ([*disturbed()[:-1], line(4, 3.0, generation=1)], digests(), "iteration 4: lm_loss_hex is"),
        (
            [*disturbed()[:-1], line(4, LOSSES[3], generation=1, grad_norm_hex=(1.0).hex())],
            digests(),
            "iteration 4: grad_norm_hex is",
        ),
        (disturbed()[:-1], digests(), "iteration 4: in"),
        ([*disturbed(), line(5, 3.0)], digests(), "iteration 5: in"),
        (
            [*disturbed()[:2], line(3, 4.5), *disturbed()[3:]],
            digests(),
            "iteration 3 was computed again with another lm_loss_hex",
        ),
        (disturbed(), digests(seat1={"parameters": "p1", "optimizer": "other"}), "seat 1: optimizer is o1 in"),
        (disturbed(), digests(seat1={"parameters": "p1"}), "seat 1: digest of optimizer in"),
        (disturbed(), digests(seat0={}), "seat 0: digest of optimizer in"),
    ],
)
def test_the_first_difference_is_named(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], steps: list[dict[str, Any]], final: Any, said: str
) -> None:
    write(runs[1], steps, final)
    for pair in (runs, runs[::-1]):
        assert compare(pair) == 1
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        assert "different: " in out
        assert said.split(" is o1")[0] in out


def test_one_unit_in_the_last_place_is_a_difference(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = disturbed()
    steps[-1]["lm_loss_hex"] = "0x1.f000000000001p+1"
    write(runs[1], steps, digests())
    assert compare(runs) == 1
    assert "0x1.f000000000001p+1 (3.875)" in capsys.readouterr().out


def test_samples_count_where_both_have_them(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with_samples = [step | {"samples_digest": f"s{step['iteration']}"} for step in disturbed()]
    write(runs[1], with_samples, digests())
    assert compare(runs) == 0
    write(runs[0], [step | {"samples_digest": f"s{step['iteration']}"} for step in undisturbed()], digests())
    assert compare(runs) == 0
    assert "and samples" in capsys.readouterr().out
    with_samples[-1]["samples_digest"] = "other"
    write(runs[1], with_samples, digests())
    assert compare(runs) == 1
    assert "iteration 4: samples_digest is s4" in capsys.readouterr().out


def test_values_that_are_no_numbers_compare(runs: tuple[Path, Path]) -> None:
    steps = [line(1, float("nan"), grad_norm_hex=None)]
    for directory in runs:
        write(directory, steps, digests())
    assert compare(runs) == 0


def test_a_line_cut_off_by_a_crash_is_left_out(runs: tuple[Path, Path]) -> None:
    text = "".join(json.dumps(step) + "\n" for step in disturbed())
    write(runs[1], text + '{"iteration": 5, "lm_l', digests())
    assert compare(runs) == 0


def test_nothing_recorded_is_not_identical(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for directory in runs:
        write(directory, [], digests())
    assert compare(runs) == 1
    assert "no iteration" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "final", "said"),
    [
        ("not json\n", digests(), "steps.jsonl, line 1: not a step"),
        ('{"iteration": 1}\n', digests(), "line 1: not a step (no 'lm_loss_hex')"),
        (undisturbed(), "[]", "final.json: no digests per seat"),
        (undisturbed(), "{", "final.json: no digests per seat"),
        (undisturbed(), {"iterations": 4}, "(no 'seats')"),
    ],
)
def test_unreadable_records_are_exit_2(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], steps: Any, final: Any, said: str
) -> None:
    write(runs[1], steps, final)
    assert compare(runs) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("missing", ["steps.jsonl", "final.json"])
def test_missing_files_are_exit_2(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], missing: str) -> None:
    (runs[0] / missing).unlink()
    assert compare(runs) == 2
    assert f"no {missing}" in capsys.readouterr().err


def test_missing_directories_are_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare((tmp_path / "x", tmp_path / "y")) == 2
    assert capsys.readouterr().err == f"deadpool: {tmp_path / 'x'}: no such run directory\n"
