"""Rules of the tree that no linter knows."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def test_protocol_imports_the_standard_library_and_itself() -> None:
    for path in sorted((ROOT / "deadpool_ext" / "protocol").rglob("*.py")):
        foreign = {
            name
            for name in _imported(path)
            if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("deadpool_ext.protocol")
        }
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_protocol_reads_no_clock_and_starts_nothing() -> None:
    forbidden = {"time", "socket", "threading", "asyncio", "subprocess", "multiprocessing", "random", "os"}
    for path in sorted((ROOT / "deadpool_ext" / "protocol").rglob("*.py")):
        used = {name.split(".")[0] for name in _imported(path)} & forbidden
        assert not used, f"{path.relative_to(ROOT)} imports {sorted(used)}"


def test_deadpool_ext_never_imports_megatron() -> None:
    for path in sorted((ROOT / "deadpool_ext").rglob("*.py")):
        assert not any(name.split(".")[0] == "megatron" for name in _imported(path)), path.relative_to(ROOT)


def test_megatron_is_a_namespace_portion_with_hotswap_alone() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()
    folders = {path.name for path in (ROOT / "megatron").iterdir() if path.name != "__pycache__"}
    assert folders == {"hotswap"}


def test_what_an_unprotected_run_imports_leads_to_nothing_of_the_runtime() -> None:
    runtime = ("megatron.hotswap.runtime", "megatron.hotswap.loop", "megatron.hotswap.state")
    ours = ("deadpool_ext.control", "deadpool_ext.replication", "deadpool_ext.comm")
    hotswap = ROOT / "megatron" / "hotswap"
    modules = [hotswap / "arguments.py", hotswap / "patches" / "base.py", hotswap / "patches" / "registry.py"]
    for path in [*modules, *sorted((hotswap / "gpt").glob("*.py")), *sorted((hotswap / "device").glob("*.py"))]:
        found = {name for name in _imported(path) if name.startswith((*runtime, *ours))}
        assert not found, f"{path.relative_to(ROOT)} imports {sorted(found)}"
