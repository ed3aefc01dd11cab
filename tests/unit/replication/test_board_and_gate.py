"""The board's words and the gate that reads them."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from deadpool_ext import _native
from deadpool_ext.protocol.types import Version
from deadpool_ext.replication import memfd
from deadpool_ext.replication.board import Board, Commit
from deadpool_ext.replication.errors import (
    FencedError,
    GateTimeoutError,
    SegmentFormatError,
    StoppedError,
)
from deadpool_ext.replication.gate import wait_committed


def at(v: int, lineage: int = 0) -> Version:
    return Version(v=v, lineage=lineage)


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create()
    yield made
    made.close()


def soon() -> float:
    return time.monotonic() + 20


def test_a_new_board(board: Board) -> None:
    assert board.fence_generation() == 0 and board.committed() is None


def test_commits_and_fences_are_seen_through_another_mapping(board: Board) -> None:
    other = Board.open(board.path)
    assert board.commit(0, at(3))
    assert other.committed() == Commit(generation=0, version=at(3))
    assert other.fence(2) and board.fence_generation() == 2
    other.close()


def test_an_older_generation_has_no_effect_inv4(board: Board) -> None:
    assert board.fence(2)
    assert not board.fence(1) and not board.fence(2)
    assert board.fence_generation() == 2
    assert not board.commit(1, at(9))
    assert board.committed() is None
    assert board.commit(2, at(5, 1))
    assert not board.commit(2, at(4, 1)) and not board.commit(2, at(5, 1))
    assert board.commit(2, at(6, 2)) and board.commit(3, at(6, 2))
    assert board.committed() == Commit(generation=3, version=at(6, 2))


def test_a_writer_killed_while_committing_hides_the_commit_until_its_successor(board: Board) -> None:
    board.commit(0, at(1))
    raw = memfd.attach(board.path)
    _native.store_u64(raw, 128, _native.load_u64(raw, 128) + 1)  # odd: in the middle of a change
    assert board.committed() is None
    assert board.commit(0, at(2))
    assert board.committed() == Commit(generation=0, version=at(2))
    raw.close()


def test_a_reader_never_sees_words_of_two_commits(board: Board) -> None:
    child = os.fork()
    if child == 0:
        mine = Board.open(board.path)
        v = 0
        while True:
            v += 1
            mine.commit(v, at(v, v))
    try:
        deadline = soon()
        seen = set[int]()
        while len(seen) < 500 and time.monotonic() < deadline:
            commit = board.committed()
            if commit is not None:
                assert commit.generation == commit.version.v == commit.version.lineage
                seen.add(commit.generation)
        assert len(seen) >= 500
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_something_else_is_not_opened_as_a_board() -> None:
    fd, memory = memfd.create("other", 4096, advice="")
    with pytest.raises(SegmentFormatError):
        Board.open(f"/proc/self/fd/{fd}")
    memory.close()
    os.close(fd)


def test_an_open_gate_costs_nothing(board: Board) -> None:
    board.commit(0, at(7))
    assert wait_committed(board, 0, at(7), soon()) == 0.0
    assert wait_committed(board, 0, at(6), soon()) == 0.0


def test_the_gate_opens_when_the_commit_arrives(board: Board) -> None:
    timer = threading.Timer(0.02, board.commit, args=(0, at(1)))
    timer.start()
    assert 0.0 < wait_committed(board, 0, at(1), soon()) < 10
    timer.join()


def test_a_commit_of_the_generation_before_does_not_open_the_gate_of_this_one(board: Board) -> None:
    board.commit(0, at(1))
    board.fence(1)
    with pytest.raises(GateTimeoutError, match="version 1"):
        wait_committed(board, 1, at(1), time.monotonic())
    board.commit(1, at(1))
    assert wait_committed(board, 1, at(1), soon()) == 0.0


def test_a_fence_ends_the_wait(board: Board) -> None:
    timer = threading.Timer(0.02, board.fence, args=(4,))
    timer.start()
    with pytest.raises(FencedError) as caught:
        wait_committed(board, 0, at(1), soon())
    assert caught.value.generation == 4
    timer.join()


def test_a_fence_wins_over_a_commit(board: Board) -> None:
    board.commit(0, at(1))
    board.fence(1)
    with pytest.raises(FencedError):
        wait_committed(board, 0, at(1), soon())


def test_the_caller_can_stop_the_wait(board: Board) -> None:
    with pytest.raises(StoppedError):
        wait_committed(board, 0, at(1), soon(), lambda: True)
