"""Planned swaps step by step: preparing, pausing, switching, and every way in which one is given up."""

from __future__ import annotations

import pytest

from deadpool_ext.protocol import messages as m
from deadpool_ext.protocol.effects import Send, SendOperators
from deadpool_ext.protocol.state import State
from tests.unit.protocol.transcript import Transcript

PREPARED = ("n3 WorkerSeated rank=1 pid=9", "n3 Constructed rank=1")
PROMISED = tuple(f"n{rank} PauseAck rank={rank} after=3 captured=1" for rank in range(3))
STANDING = tuple(f"n{rank} Paused rank={rank} iteration=3" for rank in range(3))
COMMITTED = tuple(f"n{rank} Committed version=3.0" for rank in range(3))

ACKNOWLEDGED = (
    "n0 FenceAck workers=0:3.0 own=0@3.0 hosted=2@3.0",
    "n2 FenceAck workers=2:3.0 own=2@3.0 hosted=1@3.0",
    "n3 FenceAck",
)
CONNECTED = (
    *("n0 StoreReady rank=0", "n3 Fetched rank=1"),
    *(f"{node} {word} rank={rank}" for word in ("Rebuilt", "Restored") for rank, node in enumerate(("n0", "n3", "n2"))),
)
COMMITTED_AGAIN = tuple(f"{node} Committed version=3.0" for node in ("n0", "n2", "n3"))


def begun(command: str = "swap", spares: int = 1, **given: str) -> Transcript:
    """A job of three nodes with seats 0 to 2 at iteration 1 in which n1 is to give its seat to the spare n3."""
    transcript = Transcript()
    transcript.run(f"config nodes=3 spares={spares} dp=3")
    transcript.run("start")
    transcript.run("n2 StepDone rank=2 iteration=1")
    words = " ".join(f"{name}={value}" for name, value in ({"node": "n1"} | given).items())
    lines = transcript.run(f"operator OperatorRequest command={command} {words}")
    transcript.begin = lines  # type: ignore[attr-defined]
    return transcript


def run(transcript: Transcript, *commands: str) -> list[str]:
    return [line for command in commands for line in transcript.run(command)]


def pass_time(transcript: Transcript, seconds: float) -> list[str]:
    lines = []
    while seconds > 0:
        transcript.now += min(seconds, 2.0)
        seconds -= 2.0
        lines += transcript.run("tick")
    return lines


def answers(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("-> operators OperatorAnswer")]


def test_the_spare_prepares_while_training_goes_on() -> None:
    transcript = begun()
    assert transcript.begin[0] == "-> n3 Assign g0 seats=[1] solo=True"  # type: ignore[attr-defined]
    assert transcript.coordinator.state is State.RUNNING and transcript.coordinator.job.generation == 0
    assert transcript.coordinator.job.members.seat_nodes == ["n0", "n1", "n2"]
    assert run(transcript, "n2 StepDone rank=2 iteration=2")[0].startswith("step ")
    lines = run(transcript, *PREPARED)
    # Iteration 2 is known to be done: two later, so that the order comes in time.
    assert lines[1:] == [f"-> n{node} Pause generation=0 after=4" for node in range(3)]


def test_at_the_boundary_the_seats_change_hands_and_the_node_becomes_a_spare() -> None:
    transcript = begun()
    run(transcript, *PREPARED, *PROMISED, *STANDING[:2])
    assert run(transcript, *COMMITTED) == []
    assert transcript.coordinator.state is State.RUNNING, "one rank does not stand still yet"
    lines = run(transcript, STANDING[2])
    assert transcript.coordinator.state is State.FENCING
    assert transcript.coordinator.job.members.seat_nodes == ["n0", "n3", "n2"]
    assert [line for line in lines if "Fence" in line] == [
        *(f"-> {node} Fence g1 lost=-: n3 takes seats [1] of n1, planned" for node in ("n0", "n3", "n2")),
        "-> n1 Fence g1 lost=-: seats 1 go to n3",
    ]
    assert not any("failure" in line for line in lines)
    lines = run(
        transcript,
        "n0 FenceAck workers=0:3.0 own=0@3.0 hosted=2@3.0",
        "n2 FenceAck workers=2:3.0 own=2@3.0 hosted=1@3.0",
        "n3 FenceAck",
    )
    # The newcomer is constructed already; the node that gave its seat up keeps everything for now.
    assert not any("StandDown" in line for line in lines)
    assert any("1@n3*:replica<-n2" in line for line in lines)
    run(transcript, "n0 StoreReady rank=0", "n3 Fetched rank=1")
    for rank, node in enumerate(("n0", "n3", "n2")):
        run(transcript, f"{node} Rebuilt rank={rank}")
    transcript.now += 0.25
    for rank, node in enumerate(("n0", "n3", "n2")):
        run(transcript, f"{node} Restored rank={rank}")
    lines = run(transcript, "n2 StepDone rank=2 iteration=4")
    (done,) = [line for line in lines if "recovery_done" in line]
    assert "steps_replayed=0" in done and "planned=n3 takes seats [1] of n1" in done and "'paused': 0.25" in done
    assert answers(lines) == [] and run(transcript, *COMMITTED_AGAIN[:2]) == []
    lines = run(transcript, COMMITTED_AGAIN[2])
    assert "-> n1 StandDown generation=1 reason=seats 1 are on n3 now" in lines
    assert answers(lines) == [], "not before it could take part in another swap"
    joined, answer = run(transcript, "n1 NodeReady")
    assert joined == "log g1 spare_joined node=n1 spares=1"
    assert "ok=True final=True" in answer and "stood still for 0.25 s; n1 is a spare now" in answer
    job = transcript.coordinator.job
    assert (job.swaps, job.recoveries, job.failures, job.planned) == (1, 0, [], None)


def test_a_drained_node_leaves() -> None:
    transcript = begun("drain")
    run(transcript, *PREPARED, *PROMISED, *COMMITTED, *STANDING, *ACKNOWLEDGED, *CONNECTED)
    lines = run(transcript, "n2 StepDone rank=2 iteration=4", *COMMITTED_AGAIN)
    assert "-> n1 Shutdown code=0 reason=drained: seats 1 are on n3 now" in lines and "disconnect n1" in lines
    assert "n1" not in transcript.coordinator.job.members.gone, "it may come back as a spare"


def test_a_spare_is_drained_at_once() -> None:
    transcript = begun("drain", node="n3")
    assert "-> n3 Shutdown code=0 reason=drained: it was a spare" in transcript.begin  # type: ignore[attr-defined]
    assert transcript.coordinator.job.planned is None


def test_a_rank_that_is_past_the_boundary_moves_it() -> None:
    transcript = begun()
    run(transcript, *PREPARED)
    lines = run(transcript, "n0 PauseAck rank=0 after=3 captured=1", "n1 PauseAck rank=1 after=3 captured=3")
    assert lines == [f"-> n{node} Pause generation=0 after=7" for node in range(3)]
    # What is still said about the first one has no effect.
    assert run(transcript, "n0 Paused rank=0 iteration=3", "n2 PauseAck rank=2 after=3 captured=9") == []


GIVEN_UP = {
    "another node dies": ("lost n2 gone", "was given up: lost node n2: gone"),
    "the spare dies": ("lost n3 gone", "was given up: n3 was lost (gone)"),
    "a worker of the spare ends": (
        "n3 WorkerExited rank=1 status=1 script_error=boom",
        "ended while it prepared (boom)",
    ),
}


@pytest.mark.parametrize("how", GIVEN_UP)
def test_given_up_while_preparing(how: str) -> None:
    command, reason = GIVEN_UP[how]
    transcript = begun(spares=2)
    lines = run(transcript, command)
    (answer,) = answers(lines)
    assert "ok=False final=True" in answer and reason in answer
    assert transcript.coordinator.job.planned is None
    stood_down = any(line.startswith("-> n3 StandDown") for line in lines)
    assert stood_down == (how != "the spare dies"), "it has workers of other seats"
    if how == "another node dies":
        assert "-> n4 Assign g1 seats=[2] solo=True" in lines, "the spare that is still warm comes first"


def test_too_slow_to_prepare_or_to_come_to_the_boundary() -> None:
    transcript = begun()
    (answer,) = answers(pass_time(transcript, 121.0))
    assert "n3 was not through set-up within 120 s" in answer
    transcript = begun()
    run(transcript, *PREPARED, *PROMISED, *STANDING[:1])
    lines = pass_time(transcript, 61.0)
    assert "-> n0 Pause generation=0 after=-1" in lines, "whoever stands still goes on"
    assert "not all ranks came to the step boundary within 60 s after the first" in answers(lines)[0]
    assert transcript.coordinator.state is State.RUNNING


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"node": "n3"}, "n3 is a spare, and has no seats to give; nodes with seats: n0 n1 n2"),
        ({"node": "n7"}, "n7 is no node of this job"),
        ({"to": "n2"}, "n2 is no warm spare; warm spares: n3"),
    ],
)
def test_refused(given: dict[str, str], reason: str) -> None:
    transcript = begun(**given)
    (answer,) = answers(transcript.begin)  # type: ignore[attr-defined]
    assert "ok=False final=True" in answer and reason in answer
    assert transcript.coordinator.job.planned is None


def test_one_at_a_time_and_not_beside_a_recovery() -> None:
    transcript = begun(spares=2)
    lines = transcript.run("operator OperatorRequest command=swap node=n2")
    assert "n3 is about to replace n1: ask again when that is done" in lines[0]
    run(transcript, "lost n2 gone")
    lines = transcript.run("operator OperatorRequest command=swap node=n1")
    assert "a recovery is under way: ask again when it is done" in lines[0]


def test_without_a_spare_it_is_refused() -> None:
    transcript = begun(spares=0)
    assert "no healthy warm spare" in transcript.begin[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("how_far", [0, 3, len(ACKNOWLEDGED + CONNECTED)])
def test_a_failure_during_the_switch_gives_the_seats_back(how_far: int) -> None:
    """The node that gave them up still holds everything that belongs to them, also the copies it hosts for others."""
    transcript = begun(spares=2)
    run(transcript, *PREPARED, *PROMISED, *COMMITTED, *STANDING, *(ACKNOWLEDGED + CONNECTED)[:how_far])
    lines = run(transcript, "lost n3 gone")
    (answer,) = answers(lines)
    assert "ok=False final=True" in answer and "lost node n3: gone; n1 has its seats again" in answer
    assert transcript.coordinator.job.members.seat_nodes == ["n0", "n1", "n2"]
    assert not any("Assign" in line for line in lines), "nobody has to construct anything"
    lines = run(
        transcript,
        "n0 FenceAck workers=0:3.0 own=0@3.0 hosted=2@3.0",
        "n1 FenceAck workers=1:3.0 own=1@3.0 hosted=0@3.0",
        "n2 FenceAck workers=2:3.0 own=2@3.0 hosted=1@3.0",
    )
    assert any("0@n0:keep 1@n1:keep 2@n2:keep" in line for line in lines)


def test_a_neighbour_that_dies_during_the_switch_is_replaced_from_the_copy_that_the_leaving_node_hosts() -> None:
    transcript = begun(spares=2)
    run(transcript, *PREPARED, *PROMISED, *COMMITTED, *STANDING, *ACKNOWLEDGED)
    lines = run(transcript, "lost n0 gone")  # its only copy is on n1
    assert "-> n3 StandDown generation=1" in "".join(lines)
    assert "-> n4 Assign g2 seats=[0] solo=True" in lines
    lines = run(
        transcript,
        "n1 FenceAck workers=1:3.0 own=1@3.0 hosted=0@3.0",
        "n2 FenceAck workers=2:3.0 own=2@3.0 hosted=1@3.0",
    )
    assert any("0@n4*:replica<-n1 1@n1:keep 2@n2:keep" in line for line in lines)


def test_once_copies_are_complete_a_failure_changes_nothing_about_the_swap() -> None:
    transcript = begun(spares=2)
    run(transcript, *PREPARED, *PROMISED, *COMMITTED, *STANDING, *ACKNOWLEDGED, *CONNECTED, *COMMITTED_AGAIN)
    lines = run(transcript, "lost n0 gone")
    assert "-> n1 StandDown generation=1 reason=seats 1 are on n3 now" in lines
    assert transcript.coordinator.job.members.seat_nodes[1:] == ["n3", "n2"]
    (answer,) = answers(lines)
    assert "seats 1 are on n3, but then lost node n0: gone" in answer


def test_a_node_that_was_lost_comes_back_with_a_new_process_only() -> None:
    """F15: nothing of the old process has an effect, not even its wish to come back."""
    transcript = begun(spares=2)
    run(transcript, "lost n2 gone")
    (refused, _) = run(transcript, "n2 Hello process=p1")
    assert refused.startswith("refuse n2 on 7: this process of node n2 was given up (gone)")
    assert run(transcript, "n2 Hello process=p2") == ["-> n2 Welcome spare=True"]
    assert "n2" in transcript.coordinator.job.members.spares
    assert "n2" not in transcript.coordinator.job.members.gone
    assert run(transcript, "n2 Committed version=9.0 generation=0") == []


def test_answers_are_messages_to_operators_only() -> None:
    transcript = begun()
    effects = transcript.coordinator.handle(
        _operator(m.OperatorRequest(request="x", command="dance", arguments={})), 0.0
    )
    (answer,) = [effect.message for effect in effects if isinstance(effect, SendOperators)]
    assert isinstance(answer, m.OperatorAnswer) and not answer.ok and "'dance'" in answer.text
    assert not any(isinstance(effect, Send) for effect in effects)


def _operator(message: object) -> object:
    from deadpool_ext.protocol.effects import FromOperator

    return FromOperator(message=message)
