"""Transient or permanent, or the user's own error: what the death of a worker means, from what is known about it.

================================  =================================================================================
what is seen                      conclusion
================================  =================================================================================
killed, or ended without a word   transient: forked again on its node, restored from the node's arena
the script's own exception        transient once (memory, I/O, a bit that flipped may be the cause); the same exception
                                  in the same iteration after the restart is the script's error: the job ends with it
out of memory                     the same
sticky device error               transient: a new process has a new context; again in the same iteration on the same
                                  node: the node is replaced; again on another node: the script's error
hang                              transient: the worker is killed and forked again on its node; the same rank in the
                                  same iteration again on the same node, or every process of the node stopped: the
                                  node is replaced, if a spare is there
several transients on one node    permanent: ``transient_limit`` of them within ``transient_window_s`` (exceptions of
                                  the script not counted; ranks that hang together are one), if a spare is there
================================  =================================================================================
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

from deadpool_ext.protocol.types import NodeId, Rank


class Conclusion(enum.StrEnum):
    """What is done about it."""

    RESTART = "restart"  # transient: the worker is forked again on its own node
    REPLACE = "replace"  # permanent: a spare takes the node's seats
    STOP = "stop"  # the training script's own error ends the job


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A worker process ended. ``status``: exit code, or minus the signal. ``cause``: of ``error`` (see messages)."""

    rank: Rank
    node: NodeId
    generation: int
    status: int
    error: str = ""
    cause: str = ""
    iteration: int | None = None  # being computed, counted from 1; None: in set-up


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Ranks of one node stand still and hold the others up. ``iterations``: of ``ranks``. ``stopped``: every process
    of the node is."""

    node: NodeId
    ranks: tuple[Rank, ...]
    iterations: tuple[int, ...]
    generation: int
    stopped: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The conclusion, in words for people (``reason``) and in words to look for (``evidence``)."""

    conclusion: Conclusion
    reason: str
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When transients on one node are too many."""

    transients: int
    window_s: float


@dataclass(frozen=True, slots=True)
class _Sighting:
    generation: int
    node: NodeId


@dataclass(slots=True)
class History:
    """What happened before: errors by what they are, transients by node."""

    errors: dict[tuple[str, int | None], list[_Sighting]] = field(default_factory=dict)
    transients: dict[NodeId, list[float]] = field(default_factory=dict)
    hangs: dict[tuple[Rank, int], list[_Sighting]] = field(default_factory=dict)  # by rank and iteration

    def judge(self, death: Death, now: float, limits: Limits, *, spare: bool, fencing: bool) -> Verdict:
        """Conclude, and remember. ``spare``: one is there to take over. ``fencing``: survivors still unwind, so that
        an exception in an iteration is one of the same blow, not of the try after it."""
        seat = f"the worker of seat {death.rank} on {death.node}"
        place = "in set-up" if death.iteration is None else f"in iteration {death.iteration}"
        before = self._seen_before(death, fencing)
        if death.error and death.cause != "device":
            if before:
                return Verdict(
                    conclusion=Conclusion.STOP,
                    reason=f"{death.error} (rank {death.rank}, {place}, again after a restart)",
                    evidence="the same exception in the same iteration after a restart",
                )
            what = "ran out of memory" if death.cause == "memory" else "raised"
            reason = f"{seat} {what} {place}: {death.error}"
            return Verdict(conclusion=Conclusion.RESTART, reason=reason, evidence=death.cause or "script")
        if death.error:
            if before and (any(sighting.node != death.node for sighting in before) or not spare):
                return Verdict(
                    conclusion=Conclusion.STOP,
                    reason=f"{death.error} (rank {death.rank}, {place}, again after a restart)",
                    evidence="the same device error in the same iteration after a restart",
                )
            reason = f"{seat} lost its device {place}: {death.error}"
            if before:
                return Verdict(
                    conclusion=Conclusion.REPLACE, reason=reason, evidence="the same device error after a restart"
                )
            return self._restart(death, reason, "device error", now, limits, spare)
        how = f"signal {-death.status}" if death.status < 0 else f"exit code {death.status}"
        if death.cause == "memory":
            return self._restart(
                death, f"{seat} was killed by the kernel: the node ran out of memory", "oom-kill", now, limits, spare
            )
        return self._restart(death, f"{seat} ended ({how})", "process exit", now, limits, spare)

    def judge_hang(self, hang: Hang, now: float, limits: Limits, *, spare: bool) -> Verdict:
        """The same for ranks that do not die but stand still."""
        again = False
        for key in zip(hang.ranks, hang.iterations, strict=True):
            before = self.hangs.setdefault(key, [])
            again |= any(seen.node == hang.node and seen.generation < hang.generation for seen in before)
            before.append(_Sighting(hang.generation, hang.node))
        many = self.note_transient(hang.node, now, limits)
        if not spare or not (hang.stopped or again or many):
            evidence = "every process of the node is stopped, no spare" if hang.stopped else "standstill"
            return Verdict(conclusion=Conclusion.RESTART, reason=hang.reason, evidence=evidence)
        if hang.stopped:
            evidence = "every process of the node is stopped"
        elif again:
            evidence = "the same rank hangs in the same iteration after a restart"
        else:
            evidence = f"{limits.transients} transients within {limits.window_s:g} s on the node"
        return Verdict(conclusion=Conclusion.REPLACE, reason=hang.reason, evidence=evidence)

    def note_transient(self, node: NodeId, now: float, limits: Limits) -> bool:
        """Count a transient on ``node``; True if there were too many lately."""
        times = [at for at in self.transients.get(node, []) if at > now - limits.window_s] + [now]
        self.transients[node] = times
        return len(times) >= limits.transients

    def _restart(self, death: Death, reason: str, evidence: str, now: float, limits: Limits, spare: bool) -> Verdict:
        if self.note_transient(death.node, now, limits) and spare:
            many = f"{limits.transients} worker deaths within {limits.window_s:g} s"
            return Verdict(
                conclusion=Conclusion.REPLACE, reason=f"{many}: {reason}", evidence=f"repeated transients ({evidence})"
            )
        return Verdict(conclusion=Conclusion.RESTART, reason=reason, evidence=evidence)

    def _seen_before(self, death: Death, fencing: bool) -> list[_Sighting]:
        """Sightings of the same error before the restart that this death comes after."""
        if not death.error:
            return []
        sightings = self.errors.setdefault((same_error(death.error), death.iteration), [])
        same_blow = fencing and death.iteration is not None
        before = [] if same_blow else [seen for seen in sightings if seen.generation < death.generation]
        sightings.append(_Sighting(death.generation, death.node))
        return before


def same_error(text: str) -> str:
    """What two messages of one error have in common: numbers and addresses differ between ranks and runs."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)
