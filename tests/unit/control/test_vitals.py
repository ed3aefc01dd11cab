"""What an agent tells of its workers in a heartbeat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deadpool_ext.comm.pulse import Blocked, Pulse, Reading
from deadpool_ext.control.vitals import Sampler, vital
from deadpool_ext.protocol.messages import Wait


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    made = Pulse.create()
    yield made
    made.close()


def reading(**changes: object) -> Reading:
    values = {
        "place": "forward",
        "iteration": 4,
        "place_s": 1.5,
        "moves": 9,
        "generation": 2,
        "busy_s": 0.25,
        "blocked": (
            Blocked(group="dp", ranks=(1, 3, 5), operation="allreduce", number=7, peer=None, seconds=1.0),
            Blocked(group="pp", ranks=(0, 3), operation="recv", number=0, peer=0, seconds=0.5),
        ),
        "collectives": {"dp": 7, "pp": 0},
    }
    return Reading(**(values | changes))  # type: ignore[arg-type]


def test_a_vital_names_whom_each_wait_needs() -> None:
    seen = vital(3, "S", reading(), in_detail=True)
    assert (seen.rank, seen.generation, seen.iteration, seen.place, seen.process) == (3, 2, 4, "forward", "S")
    assert seen.waits == (
        Wait(group="dp", ranks=(1, 3, 5), operation="allreduce", number=7, peers=(1, 5), seconds=1.0),
        Wait(group="pp", ranks=(0, 3), operation="recv", number=0, peers=(0,), seconds=0.5),
    )
    assert seen.issued == {"dp": 7, "pp": 0}


def test_of_a_worker_that_moved_no_waits_and_counts_are_told(pulse: Pulse) -> None:
    sampler = Sampler()
    pulse.set_generation(1)
    pulse.add_group("all", (0, 1))
    first = sampler.look("w", 0, os.getpid(), pulse)
    still = sampler.look("w", 0, os.getpid(), pulse)
    pulse.enter("forward", 1)
    moved = sampler.look("w", 0, os.getpid(), pulse)
    assert first is not None and still is not None and moved is not None
    assert first.moves == still.moves != moved.moves
    assert first.issued == moved.issued == {}
    assert moved.place == "forward"


def test_a_stopped_process_shows_as_stopped_and_a_gone_one_not_at_all(pulse: Pulse) -> None:
    sampler = Sampler()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        seen = sampler.look("w", 0, child.pid, pulse)
        assert seen is not None and seen.process == "T"
    finally:
        child.kill()
        child.wait()
    assert sampler.look("w", 0, child.pid, pulse) is None
