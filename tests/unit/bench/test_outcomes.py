"""Which failure and which recovery belong to which fault."""

from __future__ import annotations

from typing import Any

from deadpool_ext.bench.outcomes import confusion, costs, outcomes


def injected(mono: float, kind: str) -> dict[str, Any]:
    return {"event": "fault_injected", "mono": mono, "fault": {"kind": kind}}


def failed(mono: float, verdict: str, evidence: str = "process exit") -> list[dict[str, Any]]:
    return [
        {"event": "failure_detected", "mono": mono + 0.5, "detected_mono": mono},
        {"event": "failure_classified", "mono": mono + 0.5, "class": verdict, "evidence": evidence},
    ]


def recovered(mono: float, total: float) -> dict[str, Any]:
    seconds = {"detect": 0.1, "total": total}
    return {"event": "recovery_done", "mono": mono, "seconds": seconds, "steps_replayed": 1}


STEPS = [{"step_seconds": 0.2}, {"step_seconds": 0.2}, {"step_seconds": 1.0}]


def test_one_after_the_other() -> None:
    events = [
        injected(10.0, "kill-rank"),
        *failed(10.1, "transient"),
        recovered(11.0, 1.0),
        injected(12.0, "hold-gil"),
        injected(20.0, "kill-node"),
        *failed(20.1, "permanent", "connection"),
        recovered(21.5, 1.5),
    ]
    found = outcomes(events, STEPS)
    assert [(outcome.kind, outcome.decided, outcome.total) for outcome in found] == [
        ("kill-rank", "transient", 1.0),
        ("hold-gil", "none", None),
        ("kill-node", "permanent", 1.5),
    ]
    assert found[0].beyond_a_step == 0.8
    assert confusion(found)["kill-node"] == {"permanent": 1}
    assert costs(found)["kill-node"].worst == 1.5
    assert "hold-gil" not in costs(found)


def test_a_detection_that_overtook_the_word_of_its_cause() -> None:
    events = [*failed(10.1, "permanent"), injected(10.0, "kill-node"), recovered(11.0, 1.0)]
    (outcome,) = outcomes(events, STEPS)
    assert (outcome.decided, outcome.total) == ("permanent", 1.0)


def test_a_run_without_faults() -> None:
    assert outcomes([recovered(1.0, 1.0)], STEPS) == []
