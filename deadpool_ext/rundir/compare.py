"""Are two runs the same, bit for bit? Pure judgement over the records of two run directories.

Compared are, per iteration, the loss and the gradient norm as ``float.hex()`` strings and the digest of the samples
where both runs have one, and at the end the digest of every part of every seat's state. Nothing is compared with a
tolerance (INV-5). An iteration that was replayed must also agree with its own earlier computations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deadpool_ext.protocol.types import UsageError

#: Fields of a line of ``steps.jsonl`` that must be equal; the last only where both lines have it.
EXACT_FIELDS = ("lm_loss_hex", "grad_norm_hex")
OPTIONAL_FIELDS = ("samples_digest",)


class RunRecordError(UsageError):
    """A run directory lacks a file, or a file in it cannot be read as what it should be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One computation of one iteration. ``values`` holds the compared fields that the line has."""

    iteration: int
    generation: int
    values: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What is compared of one run. ``steps`` in the order they were written, replays included."""

    name: str
    steps: tuple[Step, ...]
    digests: Mapping[int, Mapping[str, str]]  # seat -> part of its state -> digest

    @property
    def last(self) -> dict[int, Step]:
        """The computation of each iteration that counts: the last one."""
        return {step.iteration: step for step in self.steps}

    @property
    def replayed(self) -> int:
        """How many computations of an iteration were superseded by a later one."""
        return len(self.steps) - len(self.last)


def parse_steps(name: str, lines: Iterable[str]) -> tuple[Step, ...]:
    """Steps of a ``steps.jsonl``. A last line without its newline was cut off by a crash and is left out.

    Raises :class:`RunRecordError` naming file and line for anything else that is not a step.
    """
    steps: list[Step] = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            values = {key: record[key] for key in EXACT_FIELDS}
            values |= {key: record[key] for key in OPTIONAL_FIELDS if record.get(key) is not None}
            steps.append(
                Step(iteration=int(record["iteration"]), generation=int(record.get("generation", 0)), values=values)
            )
        except (ValueError, TypeError, KeyError) as error:
            raise RunRecordError(f"{name}, line {number}: not a step ({_reason(error)})") from error
    return tuple(steps)


def parse_digests(name: str, text: str) -> dict[int, dict[str, str]]:
    """Digests per seat out of a ``final.json``: ``{"seats": [{"rank": 0, "digests": {...}}, ...]}``.

    Raises :class:`RunRecordError` when it has no such shape.
    """
    try:
        return {int(seat["rank"]): dict(seat["digests"]) for seat in json.loads(text)["seats"]}
    except (ValueError, TypeError, KeyError) as error:
        raise RunRecordError(f"{name}: no digests per seat in it ({_reason(error)})") from error


def read_run(directory: Path) -> RunRecord:
    """Read ``steps.jsonl`` and ``final.json`` of a run directory. Raises :class:`RunRecordError`."""
    steps = directory / "steps.jsonl"
    final = directory / "final.json"
    if not directory.is_dir():
        raise RunRecordError(f"{directory}: no such run directory")
    try:
        lines = steps.read_text(encoding="utf-8").splitlines(keepends=True)
        text = final.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        hint = " (the run has not ended, or ended without a result)" if missing == final.name else ""
        raise RunRecordError(f"{directory}: no {missing}{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RunRecordError(f"{directory}: {error}") from error
    return RunRecord(
        name=str(directory),
        steps=parse_steps(str(steps), lines),
        digests=parse_digests(str(final), text),
    )


def first_difference(a: RunRecord, b: RunRecord) -> str | None:
    """The first thing in which the runs differ, as one readable line; None when they are identical."""
    return _replay_difference(a) or _replay_difference(b) or _step_difference(a, b) or _digest_difference(a, b)


def summary(a: RunRecord, b: RunRecord) -> str:
    """What was found equal, for two runs without a difference."""
    seats = sum(1 for digests in a.digests.values() if digests)
    parts = sum(len(digests) for digests in a.digests.values())
    samples = all("samples_digest" in step.values for run in (a, b) for step in run.steps)
    compared = "losses, gradient norms and samples" if samples else "losses and gradient norms"
    final = (
        f"{parts} digests of the final state of {seats} seats" if parts else "no digests of the final state in either"
    )
    return f"identical: {compared} of {len(a.last)} iterations ({a.replayed} and {b.replayed} replayed), {final}"


def _replay_difference(run: RunRecord) -> str | None:
    first: dict[int, Step] = {}
    for step in run.steps:
        earlier = first.setdefault(step.iteration, step)
        field = _differing_field(earlier, step)
        if field is not None:
            return (
                f"{run.name}: iteration {step.iteration} was computed again with another {field}: "
                f"{_show(earlier.values[field])} in generation {earlier.generation}, "
                f"{_show(step.values[field])} in generation {step.generation}"
            )
    return None


def _step_difference(a: RunRecord, b: RunRecord) -> str | None:
    steps_a, steps_b = a.last, b.last
    for iteration in sorted(steps_a.keys() | steps_b.keys()):
        if iteration not in steps_a or iteration not in steps_b:
            has, lacks = (a, b) if iteration in steps_a else (b, a)
            return f"iteration {iteration}: in {has.name} but not in {lacks.name}"
        field = _differing_field(steps_a[iteration], steps_b[iteration])
        if field is not None:
            values = [_show(steps[iteration].values[field]) for steps in (steps_a, steps_b)]
            return f"iteration {iteration}: {field} is {values[0]} in {a.name}, {values[1]} in {b.name}"
    return None if steps_a else f"no iteration in {a.name} nor in {b.name}"


def _digest_difference(a: RunRecord, b: RunRecord) -> str | None:
    for rank in sorted(a.digests.keys() | b.digests.keys()):
        parts_a, parts_b = a.digests.get(rank, {}), b.digests.get(rank, {})
        for part in sorted(parts_a.keys() | parts_b.keys()):
            if part not in parts_a or part not in parts_b:
                has, lacks = (a, b) if part in parts_a else (b, a)
                return f"seat {rank}: digest of {part} in {has.name} but not in {lacks.name}"
            if parts_a[part] != parts_b[part]:
                return f"seat {rank}: {part} is {parts_a[part]} in {a.name}, {parts_b[part]} in {b.name}"
    return None


def _differing_field(x: Step, y: Step) -> str | None:
    for field in EXACT_FIELDS:
        if x.values[field] != y.values[field]:
            return field
    for field in OPTIONAL_FIELDS:
        if field in x.values and field in y.values and x.values[field] != y.values[field]:
            return field
    return None


def _show(value: str | None) -> str:
    """A hex float with its decimal value beside it; other strings as they are."""
    if value is None:
        return "none"
    try:
        return f"{value} ({float.fromhex(value):.9g})" if value.lstrip("-").startswith("0x") else value
    except (ValueError, OverflowError):
        return value


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
