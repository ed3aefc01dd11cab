"""Faults given to a job that runs: what is done about them, and the one line for what cannot be."""

from __future__ import annotations

import pytest

from deadpool_ext.protocol.effects import Send
from deadpool_ext.protocol.faults import FaultSpec, parse_fault
from deadpool_ext.protocol.injecting import inject
from deadpool_ext.protocol.messages import AddFault
from deadpool_ext.protocol.state import Job
from deadpool_ext.protocol.types import UsageError
from tests.unit.protocol.transcript import Transcript


def running(*more: str, config: str = "config nodes=3 spares=2 dp=3") -> Transcript:
    transcript = Transcript()
    for command in (config, "start", *more):
        transcript.run(command)
    return transcript


def told(job: Job) -> dict[str, FaultSpec]:
    sent = {effect.node: effect.message for effect in job.out if isinstance(effect, Send)}
    return {node: FaultSpec.from_dict(m.fault) for node, m in sent.items() if isinstance(m, AddFault)}


def test_a_fault_with_a_place_is_told_to_everybody_and_to_whoever_comes_later() -> None:
    job = running().coordinator.job
    answer, strikes = inject(job, "kill-node:node=n1,step=5,phase=backward", 10.0)
    assert (answer, strikes) == ("kill-node on n1 in step 5, backward", [])
    assert set(told(job)) == {"n0", "n1", "n2", "n3", "n4"}
    assert told(job)["n4"] == FaultSpec(id=0, kind="kill-node", node="n1", step=5, phase="backward")
    assert [fault["id"] for fault in job.config.job.faults] == [0]


def test_without_a_time_it_happens_now_and_with_after_later() -> None:
    transcript = running()
    job = transcript.coordinator.job
    answer, strikes = inject(job, "kill-rank:rank=2", 10.0)
    assert answer == "kill-rank on rank 2 now"
    assert [(strike.node, strike.rank) for strike in strikes] == [("n2", 2)]
    assert inject(job, "kill-spare", 10.0)[0] == "kill-spare on n3 now"
    answer, strikes = inject(job, "kill-rank:node=n0,after=2", 10.0)
    assert (answer, strikes) == ("kill-rank on n0 in 2 s", [])
    assert job.timers.at("fault:2") == 12.0


def test_before_training_has_begun_times_count_from_its_beginning() -> None:
    transcript = Transcript()
    transcript.run("config nodes=3 spares=2 dp=3")
    transcript.run("n0 Hello")
    job = transcript.coordinator.job
    assert inject(job, "kill-node:node=n0", 1.0) == ("kill-node on n0 when training has begun", [])
    assert not job.timers.running("fault:0")
    assert [fault.id for fault in job.strikes.timed] == [0]


def test_a_spare_may_be_hit_once_it_trains() -> None:
    job = running().coordinator.job
    assert inject(job, "kill-node:node=n4,step=5", 1.0)[0].endswith("if n4 trains then: it is a spare")


def test_the_step_that_is_being_computed_is_taken_with_a_remark() -> None:
    job = running("n2 StepDone rank=2 iteration=3").coordinator.job
    assert "unless that is behind already" in inject(job, "kill-rank:rank=0,step=4", 1.0)[0]
    assert "unless" not in inject(job, "kill-rank:rank=0,step=5", 1.0)[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill-everything", "unknown kind"),
        ("kill-node:node=n9", "no node 'n9' in the job; nodes: n0 n1 n2 n3 n4"),
        ("kill-rank:rank=3", "no rank 3; ranks: 0 to 2"),
        ("kill-rank:rank=1,step=3", "step 3 is over; step 4 is being computed"),
        ("kill-spare:node=n0", "n0 is no spare; spares: n3 n4"),
        ("kill-rank:node=n4", "n4 is a spare, which trains nothing"),
        ("slow-node:node=n4", "n4 is a spare, which trains nothing"),
    ],
)
def test_refusals_are_one_line_and_change_nothing(text: str, words: str) -> None:
    job = running("n2 StepDone rank=2 iteration=3").coordinator.job
    with pytest.raises(UsageError) as caught:
        inject(job, text, 1.0)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert job.out == [] and job.strikes.missed == []


def test_a_node_that_was_lost_a_missing_spare_and_the_end_are_named() -> None:
    job = running("n2 StepDone rank=2 iteration=1", "lost n3 gone", "lost n4 gone").coordinator.job
    with pytest.raises(UsageError, match="no spare is waiting"):
        inject(job, "kill-spare", 1.0)
    job = running("n2 StepDone rank=2 iteration=1", "lost n1 power cut").coordinator.job
    with pytest.raises(UsageError, match=r"no node 'n1' in the job: lost \(power cut\)"):
        inject(job, "kill-node:node=n1", 1.0)
    job = running(*(f"n{i} TrainingFinished rank={i} iteration=1" for i in range(3))).coordinator.job
    with pytest.raises(UsageError, match="the job is over"):
        inject(job, "kill-rank:rank=0", 1.0)


def test_faults_that_never_happened_are_told_at_the_end() -> None:
    transcript = running(config="config nodes=3 spares=2 dp=3 fault=kill-node:node=n1,step=9,phase=gate")
    inject(transcript.coordinator.job, "hold-gil:rank=1,step=8,seconds=2", 1.0)
    lines = [line for i in range(3) for line in transcript.run(f"n{i} TrainingFinished rank={i} iteration=1")]
    lines += [line for i in range(3) for line in transcript.run(f"n{i} WorkerExited rank={i} status=0")]
    (line,) = [line for line in lines if "faults_missed" in line and "warning" in line]
    assert "kill-node:node=n1,step=9,phase=gate" in line
    assert "hold-gil:rank=1,step=8,phase=forward,seconds=2" in line


@pytest.mark.parametrize(
    "text",
    ["kill-node:node=n1,step=9,phase=gate", "kill-spare", "kill-rank:rank=1,after=2", "stuck-rank:rank=0,seconds=3"],
)
def test_a_fault_says_itself_as_it_was_given(text: str) -> None:
    assert parse_fault(text, live=True).text == text
