"""What nodes say about their own health, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deadpool_ext.protocol.messages import Finding
from deadpool_ext.protocol.types import NodeId


@dataclass(slots=True)
class HealthBook:
    """Rounds of questions, and who answered. Plain bookkeeping."""

    round: int = 0
    awaited: set[NodeId] = field(default_factory=set)  # of the current round
    _told: set[tuple[NodeId, str, str]] = field(default_factory=set)

    def ask(self, nodes: Iterable[NodeId]) -> int:
        """A new round to these nodes; returns its number. An older round's answers count no more."""
        self.round += 1
        self.awaited = set(nodes)
        return self.round

    def answered(self, node: NodeId, number: int) -> bool:
        """A node answered; True if it was the last one of the current round."""
        if number != self.round or node not in self.awaited:
            return False
        self.awaited.discard(node)
        return not self.awaited

    def forget(self, node: NodeId) -> None:
        """The node left."""
        self.awaited.discard(node)

    def note(self, node: NodeId, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
        """Take findings in: (those that were not told yet, the fatal ones)."""
        bad = [finding for finding in findings if not finding.ok]
        new = [finding for finding in bad if (node, finding.check, finding.detail) not in self._told]
        self._told |= {(node, finding.check, finding.detail) for finding in new}
        return new, [finding for finding in bad if finding.fatal]
