"""The story of a run, from its events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deadpool_ext.rundir.compare import RunRecordError
from deadpool_ext.rundir.summary import read_events, read_final, render, summarize

SECONDS = {"detect": 0.01, "fence": 0.02, "rebuild": 1.5, "total": 1.6}


def process(pid: int, node: str) -> dict[str, Any]:
    return {"pid": pid, "start_ticks": pid * 10, "node": node}


EVENTS = [
    {"event": "generation_start", "generation": 0, "seats": {"n0": [0, 1], "n1": [2, 3]}},
    {"event": "step", "generation": 0, "iteration": 1},
    {"event": "failure_classified", "generation": 1, "node": "n1", "rank": None, "class": "permanent",
     "reason": "connection to n1 ended"},
    {"event": "generation_start", "generation": 1, "seats": {"n0": [0, 1], "n2": [2, 3]}},
    {"event": "recovery_done", "generation": 1, "version": 5, "steps_replayed": 1, "bytes": 2_000_000,
     "sources": {"keep": 2, "replica": 2}, "seconds": SECONDS},
    {"event": "redundancy_restored", "generation": 1, "seconds": 2.25},
]  # fmt: skip
FINAL = {
    "code": 0,
    "reason": "training finished",
    "iterations": 12,
    "seats": [
        {"rank": 0, "process_start": process(10, "n0"), "process_end": process(10, "n0")},
        {"rank": 1, "process_start": process(11, "n0"), "process_end": process(11, "n0")},
        {"rank": 2, "process_start": process(12, "n1"), "process_end": process(22, "n2")},
        {"rank": 3, "process_start": None, "process_end": None},
    ],
}


def test_a_recovery_is_put_together() -> None:
    told = summarize(EVENTS, FINAL)
    (recovery,) = told.recoveries
    assert recovery.moved == {"n1": ("n2", (2, 3))}
    assert recovery.classes == ("n1: permanent (connection to n1 ended)",)
    assert (recovery.version, recovery.steps_replayed, recovery.redundancy_s) == (5, 1, 2.25)
    assert (told.seats, told.same_process, told.iterations) == (4, 2, 12)


def test_two_recoveries_are_kept_apart() -> None:
    second = [
        {**EVENTS[2], "generation": 2, "node": "n0", "rank": 1, "class": "transient"},
        {**EVENTS[3], "generation": 2},
        {**EVENTS[4], "generation": 2, "version": 7},
    ]
    first, later = summarize(EVENTS + second, FINAL).recoveries
    assert first.moved
    assert not later.moved
    assert later.classes == ("seat 1: transient (connection to n1 ended)",)
    assert later.redundancy_s is None


def test_it_reads_well() -> None:
    text = "\n".join(render(summarize(EVENTS, FINAL)))
    assert "n2 fills n1's seats 2, 3" in text
    assert "1.600 from the failure" in text
    assert "detect 0.010, fence 0.020, rebuild 1.500" in text
    assert "1 completed steps" in text
    assert "2.00 MB" in text
    assert "2 of 4 seats never changed theirs" in text


def test_an_undisturbed_run_has_no_recovery() -> None:
    told = summarize(EVENTS[:2], FINAL)
    assert told.recoveries == ()
    assert len(render(told)) == 2


def test_files_are_read_and_refused(tmp_path: Path) -> None:
    events, final = tmp_path / "events.jsonl", tmp_path / "final.json"
    events.write_text("".join(json.dumps(event) + "\n" for event in EVENTS) + '{"event": "cut')
    final.write_text(json.dumps(FINAL))
    assert read_events(events) == EVENTS
    assert read_final(final) == FINAL
    events.write_text("[]\n")
    final.write_text("[]")
    for read, path in ((read_events, events), (read_final, final), (read_events, tmp_path / "none")):
        with pytest.raises(RunRecordError, match=path.name):
            read(path)
