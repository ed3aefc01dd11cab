"""Does anything grow with every swap or restart? Samples of every lasting process of a job, and what they add up to.

``python -m tests.integration.hotswap.growth swaps 100 TABLE.md`` runs a job of 8 ranks with that many planned swaps
to and fro and writes the curve as a table.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.integration.hotswap.processes import steps_recorded, until
from tests.jobs import Ended, Job, JobServer

#: What is counted of a process. ``own``: KiB that are no file's and not shared memory (as forked from the launcher,
#: which has the libraries loaded: what they share is counted in each); ``shared``: KiB of shared memory it has mapped.
WHAT: Final = ("own", "shared", "threads", "files")
_FIELDS: Final = {"RssAnon": "own", "Threads": "threads"}


def look(pid: int) -> dict[str, int]:
    """One process now. Raises OSError if it is gone."""
    found = {"shared": 0}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] = int(rest.split()[0])
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:" in line:
            first, _, last = line.split()[0].partition("-")
            found["shared"] += (int(last, 16) - int(first, 16)) // 1024
    return found | {"files": len(os.listdir(f"/proc/{pid}/fd"))}


class Curve:
    """Samples of the processes that were there all the time, by name; one sample after every swap."""

    def __init__(self, jobs: JobServer) -> None:
        self._jobs = jobs
        self._samples: list[dict[tuple[int, str], dict[str, int]]] = []

    def take(self) -> None:
        """Sample every process of the job."""
        sample = {}
        for pid, name in self._jobs.processes().items():
            try:
                sample[pid, name] = look(pid)
            except OSError:
                continue  # gone since
        self._samples.append(sample)

    def __len__(self) -> int:
        return len(self._samples)

    def lasting(self) -> dict[str, dict[str, list[int]]]:
        """Name -> what -> one number a sample, of processes that are in every sample.

        Names of processes of which there are several (the launcher keeps its interpreter's) carry their pid.
        """
        always = set.intersection(*(set(sample) for sample in self._samples))
        names = [name for _, name in always]
        return {
            name if names.count(name) == 1 else f"{name} {pid}": {
                what: [sample[pid, name][what] for sample in self._samples] for what in WHAT
            }
            for pid, name in sorted(always, key=lambda key: key[1])
        }


def slope(values: list[int]) -> float:
    """Growth a sample over the second half: the median of the slopes of all pairs, which outliers do not move."""
    half = values[len(values) // 2 :]
    pairs = [
        (half[later] - half[earlier]) / (later - earlier)
        for earlier in range(len(half))
        for later in range(earlier + 1, len(half))
    ]
    return statistics.median(pairs)


def table(curve: Curve, points: int = 6) -> str:
    """The curve as Markdown, a process a line: its own memory at some samples and what it grew by in the second half;
    threads, descriptors and shared memory in the first half and in the second."""
    last = len(curve) - 1
    shown = [round(last * point / (points - 1)) for point in range(points)]
    heads = ["process", *(f"MiB after {at + 1}" for at in shown), "KiB per swap", "threads", "files", "shared KiB"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, columns in curve.lasting().items():
        own = columns["own"]
        cells = [name, *(f"{own[at] / 1024:.1f}" for at in shown), f"{slope(own):+.1f}"]
        cells += [
            f"{_range(columns[what][: last // 2 + 1])}, {_range(columns[what][last // 2 :])}" for what in WHAT[2:]
        ]
        cells.append(f"{_range(columns['shared'][: last // 2 + 1])}, {_range(columns['shared'][last // 2 :])}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def run_until_ordered(jobs: JobServer, job: Job, orders: Callable[[], None], seconds: float) -> Ended:
    """Run a job; when ``orders`` are carried out, end it with Ctrl-C."""
    failures: list[BaseException] = []

    def give() -> None:
        try:
            until(lambda: steps_recorded(job.run_dir) >= 2, "two steps")
            orders()
        except BaseException as error:
            failures.append(error)
        finally:
            pids = [pid for pid, name in jobs.processes().items() if name == "dp-coordinator"]
            for pid in pids:
                parent = int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])
                os.kill(parent, 2)

    thread = threading.Thread(target=give)
    thread.start()
    ended = jobs.run(job, seconds)
    thread.join()
    if failures:
        raise failures[0]
    return ended


def swap_to_and_fro(run_dir: Path, pair: tuple[str, str], times: int, curve: Curve) -> None:
    """Planned swaps of one node and the spare, a sample after each."""
    from deadpool_ext.control.operator_client import ask
    from deadpool_ext.control.rundir import STATUS

    for number in range(times):
        node, spare = pair if number % 2 == 0 else pair[::-1]
        until(lambda spare=spare: _is_warm(run_dir / STATUS, spare), f"{spare} is a warm spare")
        for told in ask(run_dir, "swap", {"node": node, "to": spare}):
            assert told.ok, told.text
        until(lambda node=node: _is_warm(run_dir / STATUS, node), f"{node} is a warm spare")
        curve.take()


def _is_warm(status: Path, node: str) -> bool:
    import json

    about = json.loads(status.read_text(encoding="utf-8"))["nodes"].get(node)
    return about is not None and about["role"] == "spare" and bool(about["ready"])


def _main() -> None:
    from deadpool_ext.cli.main import run as deadpool
    from tests.megatron_args import tiny_gpt

    times, out = int(sys.argv[1]), Path(sys.argv[2])
    place = Path(tempfile.mkdtemp())
    assert deadpool(["data", "stdlib", "--output", str(place / "stdlib"), "--limit-mb", "1"]) == 0
    data = {"data_path": str(place / "stdlib"), "tokenizer_type": "NullTokenizer", "vocab_size": 257}
    jobs = JobServer()
    curve = Curve(jobs)
    job = Job(run_dir=place / "run", argv=[*tiny_gpt(train_iters=100000, **data), "--deadpool"], spares=1)
    try:
        began = time.monotonic()
        ended = run_until_ordered(
            jobs, job, lambda: swap_to_and_fro(job.run_dir, ("n3", "n4"), times, curve), seconds=60 + 20 * times
        )
        seconds = time.monotonic() - began
    finally:
        jobs.close()
    swaps = ended.events("recovery_done")
    steps = [step["step_seconds"] for step in ended.steps()]
    lines = [
        f"{len(swaps)} swaps in {seconds:.0f} s; {len(steps)} iterations, median {statistics.median(steps):.2f} s",
        "",
        "| seconds | median | worst |",
        "|---|---|---|",
    ]
    for name in sorted({name for swap in swaps for name in swap["seconds"]}):
        values = [swap["seconds"][name] for swap in swaps if name in swap["seconds"]]
        lines.append(f"| {name} | {statistics.median(values):.2f} | {max(values):.2f} |")
    out.write_text("\n".join([*lines, "", table(curve), ""]), encoding="utf-8")
    print(out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    _main()
