"""The job as every node is told it, and where nodes are reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deadpool_ext.protocol.types import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """What every node needs to know about the job; sent to an agent when it is admitted."""

    job_id: str
    argv: tuple[str, ...]  # script and its arguments
    cwd: str
    env: dict[str, str]  # variables set in every worker on top of the node's own
    layout: Layout
    faults: tuple[dict[str, Any], ...] = ()  # parsed fault specs, each with an "id"
    options: dict[str, float] = field(default_factory=dict)  # deadlines in seconds, by name
    policy: dict[str, Any] = field(default_factory=dict)  # what the script's --deadpool-* arguments ask for, by name
    log_dir: str = ""  # logs/NODE/RANK.log below it; empty: inherit stdout


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAddress:
    """Where a node's replicator listens."""

    node: str
    host: str
    port: int
