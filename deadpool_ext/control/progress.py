"""What the launcher prints: a line per finished step, a line per important event, two lines at the end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO

_QUIET: Final = frozenset(
    {"step", "gate_wait", "snapshot_sealed", "replica_sealed", "unwound", "abort_done", "generation_start"}
)
_HIDDEN_FIELDS: Final = frozenset({"t", "mono", "event", "generation", "node", "rank"})
_VALUE_CHARS: Final = 160


class ProgressPrinter:
    """Formats records of the run directory as they are written. Keeps the number of spares in mind."""

    def __init__(
        self, train_iters: int | None = None, tokens_per_step: int | None = None, out: TextIO | None = None
    ) -> None:
        self._train_iters = train_iters
        self._tokens = tokens_per_step
        self._out = out
        self._spares: set[str] = set()
        self.started = False

    def line(self, text: str) -> None:
        """Print one line now. Nobody reading any more is no reason to stop the job."""
        with contextlib.suppress(BrokenPipeError):
            print(text, file=self._out or sys.stdout, flush=True)

    def record(self, kind: str, record: Mapping[str, Any]) -> None:
        """A ``step`` or an ``event`` as written to the run directory."""
        if kind == "step":
            self.line(self.step_line(record))
            return
        self._note(record)
        if record.get("event") not in _QUIET:
            self.line(self.event_line(record))

    def step_line(self, record: Mapping[str, Any]) -> str:
        """``step 12/20  loss 3.2145  0.41 s  1234 tokens/s  generation 1  spares 0``."""
        total = f"/{self._train_iters}" if self._train_iters else ""
        parts = [f"step {record.get('iteration')}{total}"]
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

    def event_line(self, record: Mapping[str, Any]) -> str:
        """``* node_lost n2: reason=...``."""
        where = [str(record["node"])] if record.get("node") is not None else []
        if record.get("rank") is not None:
            where.append(f"rank {record['rank']}")
        fields = [f"{key}={_short(value)}" for key, value in record.items() if key not in _HIDDEN_FIELDS]
        head = " ".join([f"* {str(record.get('event')).replace('_', ' ')}", *where])
        return f"{head}: {', '.join(fields)}" if fields else head

    def _note(self, record: Mapping[str, Any]) -> None:
        event, node = record.get("event"), record.get("node")
        if event == "job_start":
            self.started = True
            self._spares = set(record.get("spares") or ())
        elif event == "generation_start":  # whoever fills seats is no spare any more
            self._spares -= set(record.get("seats") or ())
        elif node is not None and event == "spare_joined":
            self._spares.add(node)
        elif node is not None and event in ("spare_left", "node_lost"):
            self._spares.discard(node)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        value = "{" + " ".join(f"{key}:{_short(item)}" for key, item in value.items()) + "}"
    text = " ".join(str(value).split())
    return text if len(text) <= _VALUE_CHARS else text[: _VALUE_CHARS - 3] + "..."


def summary_lines(final: Mapping[str, Any], run_dir: str, code: int, reason: str) -> tuple[str, str]:
    """The last two lines of a run; ``final`` may be empty."""
    verdict = "done" if code == 0 else f"stopped with exit code {code}: {reason or 'no reason was given'}"
    counts = []
    if "iterations" in final:
        counts.append(f"{final['iterations']} iterations")
    if "generations" in final:
        counts.append(f"{final['generations']} generation{'s' if final['generations'] != 1 else ''}")
    if "failures" in final:
        count = len(final["failures"]) if isinstance(final["failures"], list) else final["failures"]
        counts.append(f"{count} failure{'s' if count != 1 else ''}")
    if "replayed_steps" in final:
        counts.append(f"{final['replayed_steps']} replayed steps")
    return (f"{verdict}; {', '.join(counts)}" if counts else verdict), f"run directory: {run_dir}"
