"""Named deadlines of a machine that has no clock of its own."""

from __future__ import annotations


class Timers:
    """Deadlines by name (``kind`` or ``kind:subject``), in monotonic seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def start(self, name: str, at: float) -> None:
        """Set (or move) the deadline ``name``."""
        self._at[name] = at

    def cancel(self, name: str) -> None:
        """Forget the deadline ``name`` if it is set."""
        self._at.pop(name, None)

    def keep_only(self, kinds: tuple[str, ...]) -> None:
        """Forget all deadlines but those of these kinds."""
        self._at = {name: at for name, at in self._at.items() if name.partition(":")[0] in kinds}

    def running(self, name: str) -> bool:
        """True while ``name`` is set."""
        return name in self._at

    def at(self, name: str) -> float | None:
        """When ``name`` passes, or None."""
        return self._at.get(name)

    def cancel_kind(self, kind: str) -> None:
        """Forget all deadlines of a kind."""
        self._at = {name: at for name, at in self._at.items() if name.partition(":")[0] != kind}

    def pop_due(self, now: float) -> str | None:
        """Remove and return the earliest deadline that has passed (ties by name), or None."""
        due = [(at, name) for name, at in self._at.items() if at <= now]
        if not due:
            return None
        name = min(due)[1]
        del self._at[name]
        return name

    @property
    def earliest(self) -> float | None:
        """When the next deadline passes, or None."""
        return min(self._at.values(), default=None)

    def shift(self, seconds: float) -> None:
        """Move all deadlines: the machine itself was stopped for so long, nobody else is to blame."""
        self._at = {name: at + seconds for name, at in self._at.items()}
