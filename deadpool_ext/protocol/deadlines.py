"""Every deadline of the job in one validated value. All are seconds but ``hang_factor``, which is a factor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from deadpool_ext.protocol.types import UsageError

# (shorter, longer, why): what must hold between deadlines for each to mean what its name says.
ORDERED: tuple[tuple[str, str, str], ...] = (
    ("heartbeat_s", "node_timeout_s", "several heartbeats must fit into the time after which a silent node is lost"),
    ("heartbeat_s", "slow_s", "several looks at a rank must fit into the time after which it stands still"),
    ("collective_grace_s", "node_timeout_s", "the grace waits for evidence; silence becomes evidence by then"),
    ("node_timeout_s", "node_timeout_max_s", "the second is the upper bound of what the first may grow to"),
    ("node_timeout_max_s", "fence_s", "a silent node must be found silent before it is blamed for not acknowledging"),
    ("node_timeout_max_s", "construct_s", "a silent newcomer must be found silent before it is blamed for being slow"),
    ("node_timeout_max_s", "rebuild_s", "a silent node must be found silent before a rebuild is given up"),
    ("node_timeout_max_s", "collective_fence_s", "a silent node must be found before workers give up on a fence"),
    ("slow_s", "hang_s", "a standstill must be reported, and its stack read, before it is ended"),
    ("hang_s", "hang_max_s", "the second is the upper bound of what the first may grow to"),
    ("hang_max_s", "gate_s", "who stands still must be named before those who wait at the gate give up"),
    ("hang_max_s", "stall_s", "a hang must be found and named before the job counts as stalled without a name"),
    ("boundary_s", "stall_s", "a swap that does not come to its boundary must end before the job counts as stalled"),
    ("construct_s", "setup_s", "a newcomer's set-up is part of what the job's set-up does"),
    ("rebuild_s", "stall_s", "a rebuild must have its time before the job counts as stalled"),
    ("restore_s", "stall_s", "a restore must have its time before the job counts as stalled"),
    ("redundancy_s", "gate_s", "the coordinator must act before workers give up at the gate"),
    ("fence_s", "recover_s", "workers must wait for the plan at least as long as the slowest may take to unwind"),
    ("construct_s", "recover_s", "workers must wait at least as long as a newcomer may take"),
    ("fetch_s", "recover_s", "workers must wait at least as long as a fetch may take"),
    ("spare_wait_s", "recover_s", "workers must wait at least as long as a spare may take to warm up"),
)
# Of these the first must fit into the second so many times; and those of TIMES 1 may not be equal either.
TIMES: dict[tuple[str, str], float] = {
    ("heartbeat_s", "node_timeout_s"): 3.0,
    ("heartbeat_s", "slow_s"): 3.0,
    ("slow_s", "hang_s"): 1.0,
}
FACTORS = frozenset({"hang_factor"})


def _limit(default: float, start: str, end: str) -> float:
    """A deadline: its default, what starts it, and what happens when it passes (for docs/timeouts.md)."""
    value: float = dataclasses.field(default=default, metadata={"start": start, "end": end})
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Deadlines of coordinator, agents and workers, checked against each other.

    Raises :class:`UsageError` naming the field, or the pair of fields, that cannot be.
    """

    heartbeat_s: float = _limit(
        0.5, "the last heartbeat of a node", "the node's agent sends the next one, with a look at each of its ranks"
    )
    node_timeout_s: float = _limit(
        10.0,
        "the last sign of life of a node",
        "the node is lost. Three times the longest silence that the same node came back from in the last 10 minutes, "
        "if that is more",
    )
    node_timeout_max_s: float = _limit(
        20.0, "the last sign of life of a node", "the node is lost, whatever silences it came back from before"
    )
    slow_s: float = _limit(
        10.0,
        "a rank stands still: it enters no other part of the step and begins or ends no operation",
        "a warning names rank, node, place and who waits for it; its Python stack is read. Nothing else happens. In "
        "evaluation and in durable saves the warning comes after `hang_s`",
    )
    hang_s: float = _limit(
        60.0,
        "a rank stands still and others wait for it",
        "its worker is killed and forked again on its node, and everybody goes back to the last version. "
        "`hang_factor` times the longest standstill that ended by itself during the last 100 steps, if that is more; "
        "in the first iteration of a process, `hang_factor` times `hang_s`",
    )
    hang_max_s: float = _limit(
        600.0,
        "the same",
        "the same, whatever standstills ended by themselves before. Also the limit in evaluation, and for copies that "
        "do not become complete so that all wait at the gate. (In a durable save it is `stall_s`.)",
    )
    hang_factor: float = _limit(5.0, "(a factor, no time)", "see `hang_s`")
    collective_grace_s: float = _limit(
        0.5,
        "a collective failed (in set-up also: the script raised)",
        "if nothing died in the meantime, connections are made anew; in set-up the job stops",
    )
    health_period_s: float = _limit(60.0, "a node's health checks", "they are run again")
    fence_s: float = _limit(
        20.0, "survivors are told to leave the step", "a node that has not acknowledged is given up"
    )
    construct_s: float = _limit(
        120.0, "a new worker is told to set itself up", "its node is given up if the worker is not through"
    )
    store_s: float = _limit(30.0, "a worker is told to open the meeting point", "its node is given up")
    fetch_s: float = _limit(120.0, "the plan is sent out", "recovery starts over if a copy has not arrived")
    rebuild_s: float = _limit(
        60.0, "the meeting point is announced", "recovery starts over if a rank's groups are not connected"
    )
    restore_s: float = _limit(120.0, "the last rank is connected", "recovery starts over if a rank's state is not back")
    redundancy_s: float = _limit(300.0, "training resumes", "another recovery, if all copies are not complete again")
    boundary_s: float = _limit(
        60.0,
        "the first rank stands still at the step boundary of a planned swap",
        "the swap is given up, and training goes on, if not all ranks stand still and all copies are complete",
    )
    stall_s: float = _limit(
        1800.0, "the last finished step or committed version", "everybody goes back to the last version"
    )
    join_s: float = _limit(600.0, "the job starts", "it stops if too few nodes are ready")
    spare_wait_s: float = _limit(
        60.0,
        "enough nodes are ready; or a spare is needed that is not warm",
        "the job starts without the missing spares; the spare is given up",
    )
    setup_s: float = _limit(
        600.0, "the first workers are told to set themselves up", "the job stops if no initial version is committed"
    )
    finish_s: float = _limit(86400.0, "the first worker ended by itself", "the job stops if others still run")
    exit_s: float = _limit(60.0, "every rank is at the end of the script", "workers that still run are left behind")
    fault_group_s: float = _limit(
        2.0, "the first of several injected faults that belong together is reached", "all of them happen"
    )
    gate_s: float = _limit(
        900.0, "a rank waits at the gate before an optimizer step", "its worker gives up with an error"
    )
    collective_fence_s: float = _limit(
        120.0, "a rank's collective failed", "its worker gives up if no recovery has begun"
    )
    recover_s: float = _limit(600.0, "a rank has left the step", "its worker gives up if no plan has come")

    def __post_init__(self) -> None:
        for name, value in self.to_options().items():
            if not math.isfinite(value) or value <= 0:
                unit = "" if name in FACTORS else " of seconds"
                raise UsageError(f"deadline {name}={value:g} must be a positive number{unit}")
        if self.hang_factor < 1:
            raise UsageError(f"deadline hang_factor={self.hang_factor:g} must be at least 1")
        for shorter, longer, why in ORDERED:
            low, high = float(getattr(self, shorter)), float(getattr(self, longer))
            times = TIMES.get((shorter, longer))
            if times is not None and times > 1 and high < times * low:
                fits = f"{longer} must be at least {times:g} times {shorter}"
                raise UsageError(f"deadlines {shorter}={low:g} and {longer}={high:g}: {fits}: {why}")
            if low > high or (times == 1 and low == high):
                raise UsageError(f"deadlines {shorter}={low:g} and {longer}={high:g} are in the wrong order: {why}")

    def to_options(self) -> dict[str, float]:
        """All deadlines by name, as ``JobSpec.options`` carries them."""
        return {item.name: float(getattr(self, item.name)) for item in dataclasses.fields(self)}

    @classmethod
    def from_options(cls, options: Mapping[str, float]) -> Deadlines:
        """Inverse of :meth:`to_options`; names left out keep their defaults, unknown ones raise UsageError."""
        known = {item.name for item in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise UsageError(f"unknown deadline {name!r}; known: {', '.join(sorted(known))}")
        return cls(**{name: float(value) for name, value in options.items()})
