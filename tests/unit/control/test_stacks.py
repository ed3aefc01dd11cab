"""Python stacks read from outside: of a process that sleeps, holds the interpreter lock, is stopped or not ready."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deadpool_ext.control.stacks import StackFile, parse

WRITTEN = """Stack (most recent call first):
  File "/a/b/lib/python3.12/threading.py", line 355 in wait
  File "/a/b/megatron/training/training.py", line 12 in train_step
  File "<string>", line 1 in <module>

"""

CHILD = """
import sys, time
from deadpool_ext.control.injection import hold_gil
from deadpool_ext.control.stacks import answer_from_now_on

def inner(what, path):
    if what == "deaf":
        print("ready", flush=True)
        time.sleep(60)
    answer_from_now_on(path)
    print("ready", flush=True)
    if what == "sleep":
        time.sleep(float(sys.argv[3]))
    elif what == "read":
        print("got", sys.stdin.readline().strip(), flush=True)
    elif what == "hold":
        hold_gil(60)

inner(sys.argv[1], sys.argv[2])
print("done", flush=True)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for child in running:
        child.kill()
        with child:  # closes its pipes and waits
            pass


def start(running: list[subprocess.Popen[str]], path: str, what: str, seconds: float = 60) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, what, path, str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    running.append(child)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def test_frames_are_read_innermost_first() -> None:
    assert parse(WRITTEN) == (
        "wait (lib/python3.12/threading.py:355)",
        "train_step (megatron/training/training.py:12)",
        "<module> (<string>:1)",
    )
    assert parse("") == ()
    two = "Current thread 0x1 (most recent call first):\n" + WRITTEN.split("\n", 1)[1] + "Thread 0x2:\n" + WRITTEN
    assert parse(two) == parse(WRITTEN)


@pytest.mark.parametrize("what", ["sleep", "read", "hold"])
def test_a_blocked_process_answers_and_is_not_disturbed(started: list[subprocess.Popen[str]], what: str) -> None:
    async def ask() -> None:
        file = StackFile()
        child = start(started, file.path, what, seconds=4.0)
        for _ in range(3):
            stack = await file.ask(child.pid)
            assert any(frame.startswith("inner (") for frame in stack.frames), stack
            assert stack.problem == ""
        assert child.poll() is None
        file.close()
        assert child.stdin is not None and child.stdout is not None
        if what == "hold":
            return
        child.stdin.write("a line\n")
        child.stdin.close()
        assert child.stdout.read().split("\n")[-2] == "done"
        assert child.wait() == 0

    asyncio.run(ask())


def test_the_frame_that_holds_the_interpreter_lock_is_the_innermost(started: list[subprocess.Popen[str]]) -> None:
    async def ask() -> None:
        file = StackFile()
        child = start(started, file.path, "hold")
        while not (await file.ask(child.pid)).frames[0].startswith("hold_gil ("):
            await asyncio.sleep(0.01)  # it is on the way there
        stack = await file.ask(child.pid)  # and again
        assert stack.frames[0].startswith("hold_gil ("), stack
        file.close()

    asyncio.run(ask())


def test_why_there_is_no_stack(started: list[subprocess.Popen[str]]) -> None:
    async def ask() -> None:
        file = StackFile()
        child = start(started, file.path, "deaf")
        assert (await file.ask(child.pid)).problem == "the worker has not started yet"
        assert child.poll() is None  # without a handler the signal would have ended it
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert (await file.ask(child.pid)).problem == "stopped by a signal"
        child.kill()
        child.wait()
        assert (await file.ask(child.pid)).problem == "the process is gone"
        file.close()

    asyncio.run(ask())


def test_a_process_that_writes_nothing_costs_the_patience_and_no_more(started: list[subprocess.Popen[str]]) -> None:
    async def ask() -> None:
        file, elsewhere = StackFile(), StackFile()
        child = start(started, elsewhere.path, "sleep")
        assert (await file.ask(child.pid, patience_s=0.1)).problem == "no answer within 0.1 s"
        file.close()
        elsewhere.close()

    asyncio.run(ask())
