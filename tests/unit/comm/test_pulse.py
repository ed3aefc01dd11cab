"""A worker's pulse: what is written is read from outside, consistently, whatever the writer does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from deadpool_ext import _native, _shell
from deadpool_ext.comm import pulse as module
from deadpool_ext.comm.pulse import GROUPS, OPERATIONS, PLACES, Pulse
from deadpool_ext.comm.registry import Communicators
from deadpool_ext.comm.torch_patch import patch_torch
from deadpool_ext.replication import memfd
from deadpool_ext.replication.errors import SegmentFormatError


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    made = Pulse.create()
    yield made
    made.close()


def test_layout_and_names_are_those_of_the_native_side() -> None:
    assert module.GROUP_BYTES == _shell.COUNTERS_BYTES
    assert module.COMMUNICATION_BYTES == _shell.PULSE_BYTES
    assert module._COMMUNICATION_AT + module.COMMUNICATION_BYTES <= module._GROUPS_AT
    assert tuple(name.lstrip("_").lower() for name in _shell.operation_names()) == OPERATIONS


def test_a_new_one_is_in_setup_and_knows_no_group(pulse: Pulse) -> None:
    reading = pulse.read()
    assert (reading.place, reading.iteration, reading.generation) == ("setup", 0, -1)
    assert (reading.blocked, reading.collectives, reading.busy_s) == ((), {}, 0.0)
    assert 0.0 <= reading.place_s < 60.0


def test_every_place_is_seen_by_another_process_s_mapping(pulse: Pulse) -> None:
    worker = Pulse.open(pulse.path)
    moves = pulse.read().moves
    for number, place in enumerate(PLACES):
        worker.enter(place, number)
        worker.set_busy(0.25 * number)
        reading = pulse.read()
        assert (reading.place, reading.iteration, reading.busy_s) == (place, number, 0.25 * number)
        assert reading.moves == moves + 1 + number
    assert pulse.read().moves == pulse.read().moves  # looking is no move
    worker.close()


def test_something_else_is_no_pulse() -> None:
    fd, words = memfd.create("test", 4096, advice="none")
    with pytest.raises(SegmentFormatError, match="not a worker's pulse"):
        Pulse.open(f"/proc/self/fd/{fd}")
    words.close()


def test_a_writer_stopped_in_the_middle_of_a_change_can_still_be_looked_at(pulse: Pulse) -> None:
    pulse.enter("backward", 7)
    _native.store_u64(pulse._words, module._SEQUENCE_AT, _native.load_u64(pulse._words, module._SEQUENCE_AT) | 1)
    assert (pulse.read().place, pulse.read().iteration) == ("backward", 7)
    pulse.enter("forward", 8)  # and it goes on
    assert (pulse.read().place, pulse.read().iteration) == ("forward", 8)
    assert _native.load_u64(pulse._words, module._SEQUENCE_AT) % 2 == 0


def test_place_and_iteration_belong_together_while_they_change(pulse: Pulse, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both threads share this interpreter's lock: the writer may be suspended in a change for long.
    monkeypatch.setattr(module, "_READ_TRIES", 10**6)
    stop = threading.Event()

    def write() -> None:
        worker, iteration = Pulse.open(pulse.path), 0
        while not stop.is_set():
            iteration += 1
            worker.enter(PLACES[iteration % len(PLACES)], iteration)
        worker.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(300):
            reading = pulse.read()
            assert reading.place == PLACES[reading.iteration % len(PLACES)]
    finally:
        stop.set()
        thread.join()


def test_groups_come_and_go_and_the_table_tells_when_it_is_full(pulse: Pulse) -> None:
    shapes = [(0, 1), (0, 2, 4, 6), (5, 3, 1), (0, 1, 3, 7, 15), tuple(range(4096))]
    places = [pulse.add_group(f"group {number}", ranks) for number, ranks in enumerate(shapes)]
    assert [named.ranks for named in pulse._groups().values()] == shapes
    assert places[1] is not None
    pulse.remove_group(places[1])
    again = pulse.add_group("group X", (0, 9, 4, 6))  # as long as the other one's text, and in its place
    assert again == places[1]
    assert pulse._groups()[again].name == "group X"
    made = [pulse.add_group(f"more {number}", (0, 1)) for number in range(GROUPS)]
    assert made.count(None) == len(shapes)
    assert pulse.add_group("x" * (1 << 17), (0, 1)) is None


def test_of_groups_on_a_device_the_last_collective_is_shown(pulse: Pulse) -> None:
    place = pulse.add_group("TP 3", (4, 5), on_device=True)
    assert place is not None
    pulse.set_generation(2)
    shell = _shell.ShellBackend(0, 2, 60.0)
    shell.bind_counters(pulse.group_address(place), place)
    shell.set_local(2, _shell.Kind.SOLO)
    assert pulse.read().queued == ()
    shell.allreduce([torch.ones(1)])
    shell.barrier()
    (queued,) = pulse.read().queued
    assert (queued.group, queued.ranks, queued.number, queued.peer) == ("TP 3", (4, 5), 2, None)
    shell.bind_counters(0)


def test_operations_of_a_communicator_are_seen() -> None:
    pulse = Pulse.create()  # stays mapped: shells of this process write to it
    communicators = Communicators(rank=0, world_size=2, accelerator=False, pulse=pulse)
    patch = patch_torch(communicators)
    communicators.solo(3)
    dist.init_process_group("gloo")
    try:
        group = dist.new_group([0, 1])
        before = pulse.read()
        assert before.generation == 3
        dist.all_reduce(torch.ones(1), group=group)
        dist.barrier(group=group)
        after = pulse.read()
        moved = {name for name, count in after.collectives.items() if count != before.collectives[name]}
        assert [after.collectives[name] for name in moved] == [2]
        assert after.moves == before.moves + 4  # two began, two ended
        communicators.solo(4)
        assert set(pulse.read().collectives.values()) == {0}
        assert pulse.read().generation == 4
        assert pulse.read().moves >= after.moves
    finally:
        dist.destroy_process_group()
        assert communicators.close()
        patch.undo()
        _shell.place_pulse(0)
    assert pulse.read().collectives == {}
