"""What it costs a worker to show how it is: nanoseconds an operation, a place and a look. Prints a table.

Usage: .venv/bin/python scripts/pulse_cost.py     (seconds; needs a C++ compiler, as the build does)

The first rows are the native code by itself (csrc/comm/pulse.h in a loop): what is added to each operation that
somebody waits for. Each number is the best of a few rounds.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from deadpool_ext import _shell
from deadpool_ext.comm.pulse import Pulse

ROUNDS = 7
HEADER = Path(__file__).resolve().parents[1] / "csrc" / "comm" / "pulse.h"
NATIVE = """
#include <algorithm>
#include <cstdio>
#include "pulse.h"
using namespace deadpool;
template <typename F> double cost(F&& call) {
  double best = 1e9;
  for (int round = 0; round < 7; ++round) {
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000000; ++i) call();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    best = std::min(best, took.count() / 1e6);
  }
  return best;
}
int main() {
  const Operation operation{1, 2, 3, 4, 0};
  static GroupCounters counters{};
  const auto add = [](std::atomic<uint64_t>& word) {
    word.store(word.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  };
  std::printf("%f %f\\n", cost([&] { Blocked blocked(operation); }), cost([&] {
    add(counters.moves); add(counters.issued); add(counters.collectives); add(counters.moves); add(counters.completed);
  }));
}
"""


def native() -> tuple[float, float]:
    """Nanoseconds to be shown as blocked and not any more, and to count an operation's beginning and end."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "cost.cpp"), Path(folder, "cost")
        source.write_text(NATIVE)
        subprocess.run(
            ["c++", "-O2", "-std=c++20", f"-I{HEADER.parent}", str(source), "-o", str(program), "-pthread"], check=True
        )
        blocked, counted = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    return float(blocked), float(counted)


def nanoseconds(call: Callable[[], object], calls: int) -> float:
    """What one call costs where nothing else disturbs."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter_ns() - began) / calls)
    return best


def main() -> None:
    """Measure and print."""
    blocked, counted = native()
    pulse = Pulse.create()
    for number in range(24):
        place = pulse.add_group(f"group {number}", range(8))
    assert place is not None
    shell = _shell.ShellBackend(0, 1, 60.0)
    shell.bind_counters(pulse.group_address(place), place)
    shell.set_local(0, _shell.Kind.LOCAL)
    tensor = torch.ones(1)
    rows = [
        ("shown as blocked, and not any more", blocked),
        ("counting an operation's beginning and end", counted),
        ("entering a place (about ten an iteration)", nanoseconds(lambda: pulse.enter("forward", 1), 50_000)),
        ("a look from outside, 24 groups (the agent's time)", nanoseconds(pulse.read, 500)),
        ("for comparison: an operation of a group of one", nanoseconds(lambda: shell.allreduce([tensor]), 50_000)),
    ]
    for what, cost in rows:
        print(f"{what:52} {cost:8.0f} ns")


if __name__ == "__main__":
    main()
