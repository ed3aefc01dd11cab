"""The table of recoveries in ``docs/measurements``: every run that passed, one line a recovery.

DEADPOOL_TEST_TABLE=recoveries.jsonl scripts/test.sh --full
.venv/bin/python -m tests.integration.hotswap.table recoveries.jsonl > docs/measurements/node-loss.md
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.jobs import Ended

VARIABLE = "DEADPOOL_TEST_TABLE"
PARTS = ("detect", "fence", "unwind", "rebuild", "restore", "resume", "total")


def note(ended: Ended, variant: str) -> None:
    """Append the recoveries of a run that was found bit-identical to the file that the environment names."""
    if VARIABLE not in os.environ:
        return
    faults = [event["fault"] for event in ended.events("fault_injected")]
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        for fault, recovery in zip(faults, ended.events("recovery_done"), strict=False):
            record = {"variant": variant, "fault": fault, "recovery": recovery}
            file.write(json.dumps(record) + "\n")


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: one row a recovery, sorted, and medians at the end. Seconds."""
    lines = [f"| variant | node | phase | replayed | {' | '.join(PARTS)} |", "|---|---|---|---|" + "---|" * len(PARTS)]
    for record in sorted(records, key=lambda r: (r["variant"], r["fault"]["phase"], r["fault"]["node"])):
        seconds = record["recovery"]["seconds"]
        cells = " | ".join(f"{seconds.get(part, 0.0):.2f}" for part in PARTS)
        fault, replayed = record["fault"], record["recovery"]["steps_replayed"]
        lines.append(f"| {record['variant']} | {fault['node']} | {fault['phase']} | {replayed} | {cells} |")
    for name, choose in (("median", statistics.median), ("maximum", max)):
        cells = " | ".join(f"{choose([r['recovery']['seconds'].get(p, 0.0) for r in records]):.2f}" for p in PARTS)
        lines.append(f"| **{name}** of {len(records)} | | | | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]))
