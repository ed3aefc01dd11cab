"""Results of a benchmark on disk and on the screen: one JSON, one table, one picture, with where they come from."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under headings; the first column is left-aligned, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As a Markdown table below its title."""
        lines = [f"**{self.title}**", "", _line(self.columns), "|---" + "|---:" * (len(self.columns) - 1) + "|"]
        return "\n".join([*lines, *(_line(row) for row in self.rows)])

    def show(self, console: Console) -> None:
        """On the screen."""
        shown = RichTable(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            shown.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            shown.add_row(*row)
        console.print(shown)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """One panel of a picture: a bar per label with its spread (low, high)."""

    title: str
    unit: str
    labels: Sequence[str]
    values: Sequence[float]
    spreads: Sequence[tuple[float, float]] = ()
    log: bool = False


@dataclass(kw_only=True, slots=True)
class Results:
    """What ``deadpool bench NAME`` found. ``data``: anything JSON can hold, for whoever computes on."""

    name: str
    data: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """Tables and remarks on the screen."""
        for table in self.tables:
            table.show(console)
        for note in self.notes:
            console.print(note, highlight=False)

    def write(self, directory: Path) -> list[Path]:
        """``NAME.json``, ``NAME.md`` and, where matplotlib is installed, ``NAME.png`` in ``directory`` (made)."""
        directory.mkdir(parents=True, exist_ok=True)
        where = surroundings()
        content = {"benchmark": self.name, "surroundings": where, "notes": self.notes, **self.data}
        paths = [directory / f"{self.name}.json", directory / f"{self.name}.md"]
        paths[0].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        head = [f"# {self.name}", "", f"`{where['command']}`", "", _place(where)]
        body = [text for table in self.tables for text in ("", table.markdown())]
        paths[1].write_text("\n".join([*head, *body, "", *self.notes, ""]), encoding="utf-8")
        picture = directory / f"{self.name}.png"
        if self.bars and draw(self.bars, _place(where), picture):
            paths.append(picture)
        return paths


def surroundings() -> dict[str, Any]:
    """What a number depends on and says nothing of: command, cores, kernel, versions, load. No names of machines."""
    from importlib import metadata

    versions = {}
    for name in ("deadpool", "torch", "megatron-core"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {
        "command": " ".join(["deadpool", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def draw(bars: Sequence[Bars], caption: str, path: Path) -> bool:
    """Horizontal bars, a panel each, as a PNG. False without matplotlib, which is not needed for anything else."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [0.9 + 0.32 * len(panel.labels) for panel in bars]
    figure, axes = pyplot.subplots(
        len(bars), 1, figsize=(9, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for panel, axis in zip(bars, axes[:, 0], strict=True):
        places = list(range(len(panel.labels)))
        error = None
        if panel.spreads:
            low = [max(0.0, value - spread[0]) for value, spread in zip(panel.values, panel.spreads, strict=True)]
            high = [max(0.0, spread[1] - value) for value, spread in zip(panel.values, panel.spreads, strict=True)]
            error = [low, high]
        axis.barh(places, panel.values, xerr=error, color="#4c72b0", ecolor="#333333", capsize=3, height=0.7)
        axis.set_yticks(places, panel.labels)
        axis.invert_yaxis()
        axis.set_xlabel(panel.unit)
        axis.set_title(panel.title, loc="left", fontsize=10)
        if panel.log:
            axis.set_xscale("log")
    figure.text(0.01, 0.005, caption, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _place(where: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return f"CPU, {where['cores']} cores, {where['machine']}, Linux {where['kernel']}, {versions}, {where['date']}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
