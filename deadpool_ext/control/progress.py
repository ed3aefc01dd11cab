"""What the launcher prints: a line per finished step, a line per event that matters to people, two lines at the end.

Everything is in events.jsonl in full. Here a failure is what was lost, who took over, how long it took, and when the
job was protected again: one line each.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TextIO

Record = Mapping[str, Any]

#: Told by another line: the end of the run by the summary, phases of a recovery by ``recovery_done``, failures by
#: their classification. Frequent ones would drown the rest.
_QUIET: Final = frozenset(
    {
        "abort_done",
        "constructed",
        "degraded",
        "failure_detected",
        "fence",
        "job_end",
        "plan",
        "rank_unwound",
        "rebuild_done",
        "replica_sealed",
        "restore_done",
        "resume",
        "snapshot_sealed",
        "step",
        "unrecoverable",
        "unwound",
    }
)
_HIDDEN_FIELDS: Final = frozenset({"t", "mono", "event", "generation", "node", "rank"})
_REASON_CHARS: Final = 200
_SHOWN_SECONDS: Final = 0.005  # shorter phases of a recovery are left out


class ProgressPrinter:
    """Formats records of the run directory as they are written. Keeps spares, seats and the last step in mind."""

    def __init__(
        self, train_iters: int | None = None, tokens_per_step: int | None = None, out: TextIO | None = None
    ) -> None:
        self._train_iters = train_iters
        self._tokens = tokens_per_step
        self._out = out
        self._spares: set[str] = set()
        self._seats: dict[int, str] = {}  # seat -> node, of the last generation seen
        self._forked_again: set[int] = set()  # seats whose process died since then
        self._closed: set[str] = set()  # nodes lost by the end of their connection
        self._gate_told: object = None  # the version of which this was said
        self._highest: int | None = None  # the last finished iteration
        self.started = False

    def line(self, text: str) -> None:
        """Print one line now. Nobody reading any more is no reason to stop the job."""
        with contextlib.suppress(BrokenPipeError):
            print(text, file=self._out or sys.stdout, flush=True)

    def record(self, kind: str, record: Record) -> None:
        """A ``step`` or an ``event`` as written to the run directory."""
        text = self.step_line(record) if kind == "step" else self.event_line(record)
        if text is not None:
            self.line(text)

    def step_line(self, record: Record) -> str:
        """``step 12/20  loss 3.2145  0.41 s  1234 tokens/s  generation 1  spares 0``."""
        iteration = record.get("iteration")
        self._note_step(iteration)
        parts = [f"step {iteration}/{self._train_iters}" if self._train_iters else f"step {iteration}"]
        loss, seconds = record.get("lm_loss"), record.get("step_seconds")
        if isinstance(loss, int | float):
            parts.append(f"loss {loss:.4f}")
        if isinstance(seconds, int | float) and seconds > 0:
            parts.append(f"{seconds:.2f} s")
            if self._tokens:
                parts.append(f"{self._tokens / seconds:.0f} tokens/s")
        parts.append(f"generation {record.get('generation')}")
        parts.append(f"spares {len(self._spares)}")
        return "  ".join(parts)

    def event_line(self, record: Record) -> str | None:
        """One line, beginning with ``*``; None for an event that another line tells. Takes note of it in any case."""
        event = str(record.get("event"))
        if event == "step":
            self._note_step(record.get("iteration"))
        if event in _QUIET:
            return None
        tell = _TELL.get(event)
        text = _fallback(record) if tell is None else tell(self, record)
        return None if text is None else f"* {text}"

    # ---- events ----------------------------------------------------------------------------------------------------

    def _job_start(self, record: Record) -> str:
        self.started = True
        self._spares = set(record.get("spares") or ())
        nodes = list(record.get("nodes") or ())
        sizes = [record.get(f"{name}_parallel", "?") for name in ("tensor", "pipeline", "data")]
        return (
            f"job start: {record.get('world_size')} ranks on {len(nodes)} nodes {' '.join(nodes)}, "
            f"spares {' '.join(sorted(self._spares)) or 'none'}, "
            f"layout TP{sizes[0]} x PP{sizes[1]} x DP{sizes[2]}"
        )

    def _generation_start(self, record: Record) -> str | None:
        seats = {int(seat): node for node, held in (record.get("seats") or {}).items() for seat in held}
        before, self._seats = self._seats, seats
        self._spares -= set(seats.values())  # whoever fills seats is no spare any more
        moved: dict[str, list[int]] = {}
        for seat, node in sorted(seats.items()):
            if before.get(seat, node) != node:
                moved.setdefault(node, []).append(seat)
        changed = {seat for held in moved.values() for seat in held} | self._forked_again
        self._forked_again = set()
        if not moved:
            return None
        takers = ", ".join(f"{node} takes over seats {_numbers(held)}" for node, held in moved.items())
        return f"{takers} (generation {record.get('generation')}), the other {len(seats) - len(changed)} processes stay"

    def _node_lost(self, record: Record) -> str:
        node = record.get("node")
        self._spares.discard(str(node))
        reason = "connection closed" if node in self._closed else _text(record.get("reason") or "no reason given")
        seats = f": seats {_numbers(record['seats'])}" if record.get("seats") else ""
        return f"{node} lost ({reason}) {self._step()}{seats}"

    def _failure(self, record: Record) -> str | None:
        kind, rank, reason = record.get("kind"), record.get("rank"), str(record.get("reason"))
        match kind:
            case "node_lost":  # has an event of its own
                if record.get("evidence") == "connection":
                    self._closed.add(str(record.get("node")))
                return None
            case "worker_exited" if rank is not None:
                self._forked_again.add(int(rank))
                again = "" if record.get("class") == "permanent" else "; it is forked again"
                return f"{_text(reason)} {self._step()}{again}"
            case "collective_failed":
                seat, left, _ = reason.partition(" left a collective")
                what = f"{seat} left it" if left else _text(reason)
                return f"a collective failed {self._step()}, no node lost: {what}"
        return f"failure {self._step()}: {_text(reason)}"

    def _recovered(self, record: Record) -> str:
        seconds = dict(record.get("seconds") or {})
        total = seconds.pop("total", 0.0)
        phases = " ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= _SHOWN_SECONDS)
        replayed = record.get("steps_replayed", 0)
        if record.get("planned") and not record.get("failures"):
            return (
                f"planned swap done after iteration {record.get('version')}: training stood still for {total:.2f} s: "
                f"{phases}"
            )
        return (
            f"recovered in {total:.2f} s: {phases}; resumed from iteration {record.get('version')}, "
            f"{replayed} completed step{'' if replayed == 1 else 's'} recomputed"
        )

    def _swap_begun(self, record: Record) -> str:
        seats = " ".join(map(str, record.get("seats") or ()))
        then = "leaves then" if record.get("leaves") else "is a spare then"
        node, to = record.get("node"), record.get("to")
        return f"planned swap: {to} prepares to take seats {seats} of {node}, which {then}; training goes on"

    def _redundant(self, record: Record) -> str:
        return f"redundancy restored after {record.get('seconds', 0.0):.1f} s"

    def _spare_joined(self, record: Record) -> str | None:
        node = str(record.get("node"))
        if node in self._spares:
            return None  # told at the start of the job
        self._spares.add(node)
        return f"{node} joined as a spare: {_count(record.get('spares'), 'spare')} now"

    def _spare_left(self, record: Record) -> str:
        self._spares.discard(str(record.get("node")))
        left = _count(record.get("spares"), "spare")
        if str(record.get("reason", "")).startswith("drained"):
            return f"{record.get('node')} left ({_text(record.get('reason'))}): {left} left"
        return f"spare {record.get('node')} lost ({_text(record.get('reason'))}): {left} left"

    def _fault(self, record: Record) -> str:
        fault: Record = record.get("fault") or {}
        after = fault.get("after_s")
        when = (
            f"at step {fault.get('step')}, {fault.get('phase')}"
            if after is None
            else f"after {after:g} s"
            if after
            else "now"
        )
        kind = str(fault.get("kind"))
        where = record.get("node") if kind.endswith("-node") else _where(record)
        return f"fault: {kind} {where} {when}"

    def _corruption(self, record: Record) -> str:
        if record.get("kind") == "parameters":
            return f"parameters differ after iteration {record.get('version')}: {_text(record.get('reason'))}"
        return f"corrupt copy found on {_where(record)}: {_text(record.get('reason'))}"

    def _warning(self, record: Record) -> str | None:
        if record.get("kind") == "stale":
            return None  # a peer entered the new generation first, and refused the old one (INV-4): any recovery has it
        where = _where(record)
        return f"warning{f' {where}' if where else ''}: {_text(record.get('reason') or record.get('text'))}"

    def _gate(self, record: Record) -> str | None:
        if not record.get("still_waiting") or record.get("version") == self._gate_told:
            return None
        self._gate_told = record.get("version")
        return f"waiting at the gate: the copies of iteration {record.get('version')} are not complete yet"

    def _note_step(self, iteration: object) -> None:
        if isinstance(iteration, int):
            self._highest = iteration if self._highest is None else max(self._highest, iteration)

    def _step(self) -> str:
        return "during set-up" if not self._seats else f"in step {(self._highest or 0) + 1}"


_TELL: Final[Mapping[str, Callable[[ProgressPrinter, Record], str | None]]] = {
    "corruption_detected": ProgressPrinter._corruption,
    "gate_wait": ProgressPrinter._gate,
    "failure_classified": ProgressPrinter._failure,
    "fault_injected": ProgressPrinter._fault,
    "generation_start": ProgressPrinter._generation_start,
    "job_start": ProgressPrinter._job_start,
    "node_lost": ProgressPrinter._node_lost,
    "recovery_done": ProgressPrinter._recovered,
    "redundancy_restored": ProgressPrinter._redundant,
    "spare_joined": ProgressPrinter._spare_joined,
    "spare_left": ProgressPrinter._spare_left,
    "swap_begun": ProgressPrinter._swap_begun,
    "warning": ProgressPrinter._warning,
}


def _fallback(record: Record) -> str:
    """An event that has no words of its own: its plain fields."""
    fields = [
        f"{key.replace('_', ' ')} {_text(value)}"
        for key, value in record.items()
        if key not in _HIDDEN_FIELDS and isinstance(value, str | int | float)
    ]
    head = " ".join(filter(None, [str(record.get("event")).replace("_", " "), _where(record)]))
    return f"{head}: {', '.join(fields)}" if fields else head


def _where(record: Record) -> str:
    parts = [str(record["node"])] if record.get("node") is not None else []
    if record.get("rank") is not None:
        parts.append(f"rank {record['rank']}")
    return " ".join(parts)


def _text(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 3] + "..."


def _numbers(values: Iterable[object]) -> str:
    return " ".join(str(value) for value in values)


def _count(number: object, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def summary_lines(final: Record, run_dir: str, code: int, reason: str) -> tuple[str, str]:
    """The last two lines of a run; ``final`` may be empty."""
    verdict = "done" if code == 0 else f"stopped with exit code {code}: {reason or 'no reason was given'}"
    counts = []
    if "iterations" in final:
        counts.append(_count(final["iterations"], "iteration"))
    if "generations" in final:
        counts.append(_count(final["generations"], "generation"))
    if "failures" in final:
        count = len(final["failures"]) if isinstance(final["failures"], list) else final["failures"]
        counts.append(_count(count, "failure"))
    if "replayed_steps" in final:
        counts.append(_count(final["replayed_steps"], "recomputed step"))
    if final.get("faults_missed"):
        counts.append(f"{_count(len(final['faults_missed']), 'fault')} never happened")
    return (f"{verdict}; {', '.join(counts)}" if counts else verdict), f"run directory: {run_dir}"
