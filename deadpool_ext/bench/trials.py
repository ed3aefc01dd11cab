"""Which faults a campaign injects: drawn from a seed, one after the other within a run, never two at once."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from deadpool_ext.protocol.fault_kinds import AVAILABLE, FAULT_KINDS, Target
from deadpool_ext.protocol.types import UsageError

#: What should be decided about a failure of each kind, and in words why.
EXPECTED: Final[Mapping[str, str]] = {
    "kill-rank": "transient",
    "exit-rank": "transient",
    "raise-rank": "transient",
    "stop-rank": "transient",
    "stuck-rank": "transient",
    "sticky-device-error": "transient",
    "drop-connection": "transient",
    "kill-node": "permanent",
    "stop-node": "permanent",
    "kill-agent": "permanent",
    "stop-agent": "permanent",
    "kill-replicator": "none",
    "kill-spare": "none",
    "corrupt-slot": "none",  # alone: never read, overwritten two steps later
    "corrupt-replica": "none",
    "hold-gil": "none",  # shorter than the hang's limit: reported, not punished
    "slow-node": "none",
}
#: Seconds for kinds that last; short against the campaign's deadlines where nothing is to be decided.
SECONDS: Final[Mapping[str, float]] = {"hold-gil": 1.0, "slow-node": 0.1, "stuck-rank": 600.0}
PHASES: Final = ("data", "forward", "backward", "grad_sync", "optimizer", "d2h", "gate", "post_step")
TENSOR_PARALLEL: Final = 2  # of the job that is broken
FIRST_STEP: Final = 3
STEPS_APART: Final = 4
RUN_OUT: Final = 3  # steps after the last fault
#: Deadlines of a campaign: what is waited for is not what is measured.
DEADLINES: Final[Mapping[str, float]] = {"node_timeout_s": 3.0, "slow_s": 2.0, "hang_s": 3.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run and its faults, in the order in which they happen."""

    number: int
    faults: tuple[str, ...]
    spares: int
    iterations: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The job that is broken."""

    nodes: int
    ranks_per_node: int
    per_run: int = 1  # failures in a run, one after the other
    kinds: tuple[str, ...] = field(default_factory=lambda: tuple(kind for kind in EXPECTED if kind in AVAILABLE))

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in EXPECTED or kind not in AVAILABLE:
                raise UsageError(f"--kinds {kind}: a campaign of single failures knows {' '.join(EXPECTED)}")
        if self.per_run < 1 or self.nodes < 2:
            raise UsageError("a campaign needs at least 2 nodes and 1 failure a run")


def draw(shape: Shape, seed: int, recoveries: int) -> tuple[Trial, ...]:
    """Trials with ``recoveries`` faults in all; every kind as often as the others, places at random."""
    chance = random.Random(seed)
    kinds = [shape.kinds[index % len(shape.kinds)] for index in range(recoveries)]
    chance.shuffle(kinds)
    runs = [kinds[at : at + shape.per_run] for at in range(0, len(kinds), shape.per_run)]
    return tuple(_trial(number, run, shape, chance) for number, run in enumerate(runs))


def _trial(number: int, kinds: Sequence[str], shape: Shape, chance: random.Random) -> Trial:
    # Every fault hits a node of its own while there are enough: a node that fails again and again is another story.
    nodes = chance.sample(range(shape.nodes), shape.nodes)
    faults = []
    spares = 1
    for index, kind in enumerate(kinds):
        node = nodes[index % len(nodes)]
        step = FIRST_STEP + STEPS_APART * index
        faults.append(_spec(kind, node, step, shape, chance))
        if EXPECTED[kind] == "permanent" or kind == "kill-spare":
            spares += 1
            nodes = [other for other in nodes if other != node] or nodes
    iterations = FIRST_STEP + STEPS_APART * (len(kinds) - 1) + RUN_OUT
    return Trial(number=number, faults=tuple(faults), spares=spares, iterations=iterations)


def _spec(kind: str, node: int, step: int, shape: Shape, chance: random.Random) -> str:
    target = FAULT_KINDS[kind].target
    rank = node * shape.ranks_per_node + chance.randrange(shape.ranks_per_node)
    phases = [phase for phase in PHASES if phase != "d2h" or kind not in ("raise-rank", "stuck-rank", "hold-gil")]
    if target is Target.RANK and rank % TENSOR_PARALLEL:
        phases.remove("data")  # the first rank of a tensor-parallel group reads the data for all of them
    where = {Target.NODE: f"node={node},", Target.RANK: f"rank={rank},"}.get(target, "")
    lasts = f",seconds={SECONDS[kind]:g}" if kind in SECONDS else ""
    return f"{kind}:{where}step={step},phase={chance.choice(phases)}{lasts}"
