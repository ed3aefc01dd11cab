"""Rules of the coordinator that no transcript shows."""

from __future__ import annotations

import pytest

from deadpool_ext.protocol import messages as m
from deadpool_ext.protocol.coordinator import TABLE, Coordinator
from deadpool_ext.protocol.effects import Exit, FromNode, Log, NodeLost, Refuse, Send, Tick, WriteFinal, WriteStatus
from deadpool_ext.protocol.layout import plain_layout
from deadpool_ext.protocol.state import State
from deadpool_ext.protocol.types import ShardSpec, UsageError
from tests.property.simulated_node import make_config
from tests.unit.protocol.transcript import Transcript

ACKS = (
    "n0 FenceAck workers=0:1.0 own=0@0.0,0@1.0 hosted=2@0.0,2@1.0",
    "n2 FenceAck workers=2:1.0 own=2@0.0,2@1.0 hosted=1@0.0,1@1.0",
)
TO_STATE = {
    State.FORMING: ("n0 Hello", "n1 Hello", "n2 Hello"),
    State.STARTING: tuple(f"n{i} {word}" for word in ("Hello", "NodeReady") for i in range(5)),
    State.RUNNING: ("start", "n2 StepDone rank=2 iteration=1"),
    State.FENCING: ("start", "n2 StepDone rank=2 iteration=1", "lost n1 gone"),
    State.RECOVERING: ("start", "n2 StepDone rank=2 iteration=1", "lost n1 gone", *ACKS),
    State.RESUMING: (
        *("start", "n2 StepDone rank=2 iteration=1", "lost n1 gone", *ACKS),
        *("n3 Constructed rank=1", "n3 Fetched rank=1", "n0 StoreReady rank=0"),
    ),
    State.FINISHING: ("start", *(f"n{i} TrainingFinished rank={i} iteration=1" for i in range(3))),
    State.STOPPED: ("start", "lost n1 gone", "lost n3 gone", "lost n4 gone", "lost n0 gone"),
}
MESSAGES = {
    m.StoreReady: "n0 StoreReady rank=0",
    m.SpecDeclared: "n0 SpecDeclared rank=0",
    m.CollectiveFailed: "n0 CollectiveFailed rank=0",
    m.WorkerExited: "n0 WorkerExited rank=0 status=-9",
    m.FenceDone: "n0 FenceDone",
    m.FenceAck: "n0 FenceAck",
    m.Constructed: "n0 Constructed rank=0",
    m.Fetched: "n0 Fetched rank=0",
    m.FetchFailed: "n0 FetchFailed rank=0 source=n2",
    m.SlotCorrupt: "n0 SlotCorrupt rank=0 version=1.0",
    m.ReplicaMismatch: "n0 ReplicaMismatch rank=0 version=1.0 deviating=1",
    m.Rebuilt: "n0 Rebuilt rank=0",
    m.Restored: "n0 Restored rank=0",
    m.Committed: "n0 Committed version=1.0",
    m.PauseAck: "n0 PauseAck rank=0 after=3 captured=2",
    m.Paused: "n0 Paused rank=0 iteration=3",
    m.TrainingFinished: "n0 TrainingFinished rank=0 iteration=1",
}


def in_state(state: State) -> Transcript:
    transcript = Transcript()
    transcript.run("config nodes=3 spares=2 dp=3")
    for command in TO_STATE[state]:
        transcript.run(command)
    assert transcript.coordinator.state is state
    return transcript


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_pair_of_state_and_message(state: State, kind: type) -> None:
    """A pair outside the table has no effect; one inside is handled; an older generation never has an effect."""
    transcript = in_state(state)
    job = transcript.coordinator.job
    before = (job.state, job.generation, job.timers.earliest)
    if job.generation > 0 and kind is not m.WorkerExited:
        assert transcript.run(f"{MESSAGES[kind]} generation={job.generation - 1}") == []
        assert (job.state, job.generation, job.timers.earliest) == before, "INV-4"
    effects = transcript.run(MESSAGES[kind])
    if (state, kind) not in TABLE:
        assert effects == []
        assert (job.state, job.generation, job.timers.earliest) == before
    if state is State.STOPPED:
        assert not transcript.run("tick")


def test_table_names_only_messages_that_are_tested() -> None:
    assert {kind for _, kind in TABLE} == set(MESSAGES)


@pytest.mark.parametrize("state", [state for state in State if state is not State.STOPPED])
def test_admission_is_open_in_every_state(state: State) -> None:
    transcript = in_state(state)
    before = transcript.coordinator.job.generation
    assert transcript.run("n42 Hello")[0].startswith("-> n42 Welcome")
    joined = transcript.run("n42 NodeReady")
    assert state is State.FORMING or joined == [
        f"log g{before} spare_joined node=n42 spares={len(transcript.coordinator.job.members.spares)}"
    ]
    assert transcript.run("n42 Hello") == [
        "refuse n42 on 7: a node named n42 is a member already",
        f"log g{before} warning node=n42 reason=node refused: a node named n42 is a member already",
    ]
    assert transcript.coordinator.state is state
    assert transcript.coordinator.job.generation == before


def test_a_stopped_job_admits_nobody() -> None:
    assert in_state(State.STOPPED).run("n42 Hello") == ["refuse n42 on 7: the job is over"]


def test_messages_about_a_foreign_seat_or_from_strangers_have_no_effect() -> None:
    transcript = in_state(State.RUNNING)
    assert transcript.run("n0 WorkerExited rank=1 status=-9") == []
    assert transcript.run("n0 WorkerExited rank=99 status=-9") == []
    assert transcript.run("n3 Committed version=1.0") == []  # a spare
    assert transcript.run("n77 WorkerExited rank=0 status=-9") == []
    assert "future generation 9" in transcript.run("n0 Rebuilt rank=0 generation=9")[0]
    assert transcript.coordinator.state is State.RUNNING


def test_layout_without_peers_is_refused_or_said_plainly() -> None:
    layout = plain_layout(ranks_per_node=2, data_parallel=2)
    with pytest.raises(UsageError, match="1 rank per node on 2 nodes would do"):
        Coordinator(make_config(layout, nodes=1, spares=1))
    coordinator = Coordinator(make_config(layout, nodes=1, spares=0, allow_unprotected=True))
    hello = m.Hello(node="n0", pid=1, workers=2, address=m.NodeAddress(node="n0", host="h", port=1))
    coordinator.handle(FromNode(node="n0", message=hello), 0.0)
    effects = coordinator.handle(FromNode(node="n0", message=m.NodeReady(node="n0")), 0.0)
    warnings = [e.fields["reason"] for e in effects if isinstance(e, Log) and e.event == "warning"]
    assert warnings == ["seats [0, 1] have no peer in another failure domain and are unprotected"]


def test_too_few_nodes_and_a_missing_spare() -> None:
    transcript = Transcript()
    transcript.run("config nodes=2 spares=1 dp=2")
    transcript.run("n0 Hello")
    transcript.run("n0 NodeReady")
    coordinator = transcript.coordinator
    assert coordinator.wake_at == 10.0  # silence of n0
    transcript.run("n1 Hello")
    transcript.run("n1 NodeReady")
    for at in range(4, 60, 4):
        transcript.now = float(at)
        assert transcript.run("tick") == []
    transcript.now = 60.0  # spare_wait_s
    assert transcript.run("tick")[0].startswith("log g0 job_start")

    transcript = Transcript()
    transcript.run("config nodes=2 dp=2")
    transcript.run("n0 Hello")
    lines = transcript.run("lost n0 connection ended")
    assert lines[-1] == "exit 3: lost node n0 during set-up (connection ended): 1 of 2 nodes are left"


def test_the_coordinator_forgives_time_in_which_it_did_not_run() -> None:
    transcript = in_state(State.FENCING)
    transcript.now = 3600.0
    lines = transcript.run("n0 FenceDone")
    assert lines == ["log g1 warning reason=the coordinator did not run for 3600.0 s; deadlines are moved"]
    assert transcript.run("tick") == []
    assert transcript.coordinator.state is State.FENCING


def test_f18_a_spare_that_is_not_warm_is_waited_for() -> None:
    transcript = Transcript()
    transcript.run("config nodes=2 dp=2")
    transcript.run("start")
    transcript.run("n5 Hello")
    lines = transcript.run("lost n1 gone")
    assert not any("Assign" in line for line in lines)
    transcript.run("n0 FenceAck workers=0:0.0 own=0@0.0 hosted=1@0.0")
    assert transcript.coordinator.state is State.RECOVERING
    lines = transcript.run("n5 NodeReady")
    assert lines == ["-> n5 Assign g1 seats=[1] solo=True", "-> n5 Recover g1 target=0.0 0@n0:keep 1@n5*:replica<-n0"]


def test_newcomers_get_the_facts_of_the_first_holder_and_must_have_the_same_shard() -> None:
    transcript = in_state(State.RUNNING)
    effects = transcript.coordinator.handle(NodeLost(node="n1", reason="gone"), 0.0)
    assigns = [
        effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, m.Assign)
    ]
    assert [assign.facts for assign in assigns] == [({"of": 1},)]
    other = m.SpecDeclared(
        generation=1,
        spec=ShardSpec(rank=1, shard_bytes=7, meta_capacity=100, layout_digest="f" * 16),
    )
    effects = transcript.coordinator.handle(FromNode(node="n3", message=other), 0.0)
    assert isinstance(effects[-1], Exit) and effects[-1].code == 3
    assert "has another shard" in effects[-1].reason


def test_the_script_says_how_many_deaths_are_too_many() -> None:
    transcript = Transcript()
    transcript.run("config nodes=3 spares=1 dp=3 transient_limit=1")
    transcript.run("start")
    lines = transcript.run("n1 WorkerExited rank=1 status=-9")
    assert "1 worker deaths within 600 s" in " ".join(lines)
    assert any(line.startswith("-> n3 Assign g1 seats=[1]") for line in lines)


def test_the_error_that_ends_set_up_is_not_the_echo_of_another() -> None:
    transcript = Transcript()
    transcript.run("config nodes=2 dp=2")
    for command in ("n0 Hello", "n1 Hello", "n0 NodeReady", "n1 NodeReady"):
        transcript.run(command)
    transcript.run("n1 WorkerExited rank=1 status=1 script_error=connection_closed cause=connection")
    transcript.run("n0 WorkerExited rank=0 status=1 script_error=the_split_is_empty")
    transcript.now = 1.0
    assert transcript.run("tick")[-1] == "exit 1: the split is empty"


def test_f5_restarts_without_progress_are_bounded() -> None:
    transcript = in_state(State.RUNNING)
    lines: list[str] = []
    for round_number in range(1, 10):
        transcript.now = float(round_number * 0.1)
        lines = transcript.run("n0 CollectiveFailed rank=0")
        for node in ("n0", "n1", "n2"):
            transcript.run(f"{node} HealthReport number={round_number}")
        transcript.now += 3.0
        lines = transcript.run("tick")
        if transcript.coordinator.state is State.STOPPED:
            break
        transcript.run("n1 FenceAck workers=1:1.0 own=1@1.0 hosted=0@1.0")
        for command in ACKS:
            transcript.run(command)
        transcript.run("n0 StoreReady rank=0")
        for rank in range(3):
            transcript.run(f"n{rank} Rebuilt rank={rank}")
            transcript.run(f"n{rank} Restored rank={rank}")
        assert transcript.coordinator.state is State.RUNNING
    assert lines[-1].startswith("exit 4: 5 restarts in a row without a new step")


def test_repeated_worker_deaths_on_one_node_cost_it_its_seats() -> None:
    transcript = in_state(State.RUNNING)
    transcript.run("n1 WorkerExited rank=1 status=-9")
    transcript.run("n1 WorkerExited rank=1 status=-9")
    lines = transcript.run("n1 WorkerExited rank=1 status=-9")
    assert "disconnect n1" in lines
    assert transcript.coordinator.job.members.seat_nodes == ["n0", "n3", "n2"]
    assert any("evidence=repeated transients" in line and "class=permanent" in line for line in lines)


def test_timed_faults_count_from_the_first_committed_version() -> None:
    transcript = Transcript()
    transcript.run("config nodes=2 spares=1 dp=2 fault=kill-node:node=n1,after=2")
    transcript.run("start")
    transcript.run("operator OperatorHello")
    transcript.now = 1.9
    assert transcript.run("tick") == []
    transcript.now = 2.0
    assert transcript.run("tick") == ["-> operators Strike fault=0 kill-node node=n1"]


def test_final_and_status_content() -> None:
    transcript = in_state(State.RUNNING)
    coordinator = transcript.coordinator
    status = next(
        effect
        for effect in coordinator.handle(NodeLost(node="n1", reason="gone"), 1.0)
        if isinstance(effect, WriteStatus)
    )
    assert status.content["state"] == "fencing"
    assert status.content["degraded"] is True
    assert status.content["nodes"]["n3"] == {"role": "active", "ready": True, "seats": [1]}
    assert status.content["lost"] == {"n1": "gone"}
    coordinator.handle(NodeLost(node="n0", reason="gone"), 1.0)
    effects = coordinator.handle(NodeLost(node="n2", reason="gone"), 1.0)
    final = next(effect.content for effect in effects if isinstance(effect, WriteFinal))
    assert final["code"] == 3 and final["iterations"] == 1 and len(final["failures"]) == 3
    assert final["seats"][0]["process_start"] == {"pid": 100, "start_ticks": 100, "node": "n0"}
    assert not any(isinstance(effect, Refuse) for effect in effects)
    assert coordinator.handle(Tick(), 2.0) == []
    assert coordinator.wake_at is None


def test_a_loss_at_the_end_is_harmless() -> None:
    transcript = in_state(State.FINISHING)
    transcript.run("n0 WorkerExited rank=0")
    lines = transcript.run("lost n1 gone")
    assert any("node_lost" in line for line in lines)
    assert transcript.run("n2 WorkerExited rank=2")[-1] == "exit 0: training finished"


@pytest.mark.parametrize("state", [state for state in State if state is not State.STOPPED])
def test_f1_a_node_joins_and_leaves_in_every_state(state: State) -> None:
    """Nobody but the newcomer is told anything, no deadline moves, and the job goes on as if it had not been there."""
    transcript = in_state(state)
    job = transcript.coordinator.job
    before = (job.state, job.generation, job.timers.earliest, list(job.members.seat_nodes))
    for command in (
        "n9 Hello",
        "n9 NodeReady",
        "n9 Leaving reason=bye",
        "n8 Hello",
        "n8 NodeReady",
        "lost n8 power cut",
    ):
        effects = transcript.run(command)
        assert not [
            line
            for line in effects
            if line.startswith("-> ") and not line.startswith(("-> n8", "-> n9", "-> operators"))
        ]
        assert (job.state, job.generation, job.timers.earliest, list(job.members.seat_nodes)) == before
        assert ("n9" in job.members.members) == (command in ("n9 Hello", "n9 NodeReady"))
    if job.members.seat_nodes:
        assert any("spare_left" in line for line in effects)


@pytest.mark.parametrize("state", [State.FENCING, State.RECOVERING, State.RESUMING])
def test_f1_the_chosen_spare_dies_during_the_swap_and_the_next_takes_over(state: State) -> None:
    transcript = in_state(state)
    job = transcript.coordinator.job
    assert job.members.seat_nodes == ["n0", "n3", "n2"]
    effects = transcript.run("lost n3 gone")
    assert job.members.seat_nodes == ["n0", "n4", "n2"] and job.state is State.FENCING and job.generation == 2
    assert any(line.startswith("-> n4 Assign") for line in effects), effects


@pytest.mark.parametrize("state", [State.FENCING, State.RECOVERING, State.RESUMING])
@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_f15_a_message_of_an_older_generation_has_no_effect(state: State, kind: type) -> None:
    """Neither from a node that is in the job nor from the one that was replaced, which may say what it wants."""
    transcript = in_state(state)
    job = transcript.coordinator.job
    before = (job.state, job.generation, job.timers.earliest, list(job.members.seat_nodes), dict(job.seated_in))
    late = MESSAGES[kind].replace("rank=0", "rank=1")
    for node in ("n3", "n0"):  # n3 fills seat 1 now
        sent = late.replace("n0", node, 1).replace("rank=1", "rank=1" if node == "n3" else "rank=0")
        if kind is not m.WorkerExited or node == "n3":  # a process of n0 lives through generations
            assert transcript.run(f"{sent} generation=0") == [], sent
    for generation in (0, job.generation):
        assert transcript.run(f"{late.replace('n0', 'n1', 1)} generation={generation}") == []
    now = (job.state, job.generation, job.timers.earliest, list(job.members.seat_nodes), dict(job.seated_in))
    assert now == before
