"""Replicas of the parameters that differ: which rank is wrong, from what each holds. Pure.

Every rank of a data-parallel group holds all parameters of the group, in regions; each region is owned by one rank,
whose optimizer keeps the fp32 main parameters that it is made from. So of each region there are as many copies as
ranks, and one more opinion, its owner's main parameters. The owner's own state can be checked too: it has a sealed,
checksummed slot of the same version.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from deadpool_ext.protocol.types import Rank, invariant


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Fingerprints of one group at one version; ``ranks`` in group order, region j belongs to ``ranks[j]``."""

    ranks: tuple[Rank, ...]
    seen: tuple[tuple[int, ...], ...]  # seen[i][j]: of region j as ranks[i] holds it
    main: tuple[int, ...]  # main[j]: of region j as the main parameters of its owner give it
    intact: tuple[bool, ...]  # the owner's live optimizer state is what it sealed (or there is nothing to compare with)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """``deviating``: ranks that hold something wrong; empty where that cannot be decided. ``spoilt``: those of them
    whose sealed slot of the version is wrong as well, so that it must not be used."""

    deviating: tuple[Rank, ...]
    spoilt: tuple[Rank, ...]
    reason: str


def judge(evidence: Evidence) -> Judgement:
    """Who deviates, and why that follows."""
    count = len(evidence.ranks)
    invariant(
        len(evidence.seen) == len(evidence.main) == len(evidence.intact) == count, "evidence of another group's size"
    )
    reasons: dict[Rank, str] = {}
    spoilt: set[Rank] = set()
    undecided: list[Rank] = []
    for owner, rank in enumerate(evidence.ranks):
        if not evidence.intact[owner]:
            reasons[rank] = "its optimizer state is not what it had sealed"
    for owner, rank in enumerate(evidence.ranks):
        held = [row[owner] for row in evidence.seen]
        if len(set(held)) == 1:
            if evidence.main[owner] != held[0] and evidence.intact[owner]:
                reasons[rank] = "its main parameters are not those that it had sent to all, and were sealed so"
                spoilt.add(rank)
            continue
        truth = _truth(evidence, owner)
        if truth is None:
            undecided.append(rank)
            continue
        for other, value in zip(evidence.ranks, held, strict=True):
            if value != truth:
                reasons.setdefault(other, f"its copy of rank {rank}'s parameters is not what rank {rank} computed")
    ordered = tuple(rank for rank in evidence.ranks if rank in reasons)
    if ordered:
        words = "; ".join(f"rank {rank}: {reasons[rank]}" for rank in ordered)
        return Judgement(deviating=ordered, spoilt=tuple(sorted(spoilt)), reason=words)
    where = f" of the parameters of ranks {undecided}" if undecided else ""
    return Judgement(deviating=(), spoilt=(), reason=f"undecided: no copy{where} is known to be right")


def _truth(evidence: Evidence, owner: int) -> int | None:
    """The right fingerprint of a region of which there are different copies, or None.

    What the owner computes from its main parameters, if somebody holds the same and its state is the sealed one; else
    what most hold.
    """
    held = [row[owner] for row in evidence.seen]
    if evidence.intact[owner] and evidence.main[owner] in held:
        return evidence.main[owner]
    voters = held if evidence.intact[owner] else [value for index, value in enumerate(held) if index != owner]
    value, votes = Counter(voters).most_common(1)[0]
    return value if 2 * votes > len(voters) else None
