"""Scenario transcripts: commands, and the effects they are expected to have, in one readable text.

A file is a sequence of blocks: commands, a line ``----``, the expected effects, an empty line. Commands:

    config nodes=2 spares=1 tp=1 dp=2 pp=1 rpn=1 [fault=SPEC] [on_mismatch=swap]    the job (first command)
    at SECONDS                                                     the time of what follows
    start                                                          honest nodes up to the first committed version
    NODE MESSAGE [key=value ...]                                   a message; generation and node are filled in
    operator MESSAGE [key=value ...]
    lost NODE REASON...                                            its connection ended
    tick                                                           heartbeats of all members, then a Tick
    until SECONDS                                                  a tick every half second up to then
    vital RANK place=PLACE iteration=I moves=M [process=T] [issued=GROUP:N,...] [waits=OPERATION/GROUP/N/MEMBERS;...]
                                                                   what heartbeats say of a rank from now on; N 0: point
                                                                   to point, and MEMBERS is the peer
    silence NODE                                                   its heartbeats stop

Versions are written V.LINEAGE, slots RANK@V.LINEAGE, worker states RANK:V.LINEAGE, RANK:dirty or RANK:none.
``DEADPOOL_REWRITE=1`` writes the present effects into the files, to be reviewed as a diff.
"""

from __future__ import annotations

from typing import Any

from deadpool_ext.protocol import messages as m
from deadpool_ext.protocol.config import CoordinatorConfig
from deadpool_ext.protocol.coordinator import Coordinator
from deadpool_ext.protocol.effects import (
    Disconnect,
    Effect,
    Exit,
    FromNode,
    FromOperator,
    Log,
    NodeLost,
    Refuse,
    Send,
    SendOperators,
    Tick,
    WriteFinal,
    WriteStatus,
    WriteStep,
)
from deadpool_ext.protocol.faults import parse_faults
from deadpool_ext.protocol.layout import plain_layout
from deadpool_ext.protocol.types import RecoveryPlan, ShardSpec, SlotInfo, Version, WorkerState

SEATS = ("group", "deviating", "spoilt")


def version(text: str) -> Version:
    v, _, lineage = text.partition(".")
    return Version(v=int(v), lineage=int(lineage))


def spec(rank: int) -> ShardSpec:
    return ShardSpec(rank=rank, shard_bytes=1000, meta_capacity=100, layout_digest=f"{rank:016x}")


def slots(text: str) -> tuple[SlotInfo, ...]:
    pairs = (item.split("@") for item in text.split(",") if item)
    return tuple(
        SlotInfo(rank=int(rank), version=version(held), layout_digest=f"{int(rank):016x}") for rank, held in pairs
    )


def workers(text: str) -> tuple[WorkerState, ...]:
    states = []
    for rank, _, held in (item.partition(":") for item in text.split(",") if item):
        live = version(held) if held[0].isdigit() else None
        states.append(WorkerState(rank=int(rank), live=live, dirty=live is None))
    return tuple(states)


def vital(rank: int, generation: int, given: dict[str, str]) -> m.Vital:
    waits = []
    for text in filter(None, given.get("waits", "").split(";")):
        operation, group, number, ranks = text.split("/")
        members = tuple(int(member) for member in ranks.split(","))
        peers = tuple(member for member in members if member != rank)
        waits.append(
            m.Wait(group=group, ranks=members, operation=operation, number=int(number), peers=peers, seconds=1.0)
        )
    counts = (item.split(":") for item in given.get("issued", "").split(",") if item)
    return m.Vital(
        rank=rank,
        generation=generation,
        iteration=int(given.get("iteration", "1")),
        place=given.get("place", "forward"),
        place_s=0.0,
        moves=int(given.get("moves", "1")),
        process=given.get("process", "S"),
        waits=tuple(waits),
        issued={group: int(count) for group, count in counts},
        busy_s=float(given.get("busy", "0")),
    )


class Transcript:
    """Runs commands against one coordinator."""

    def __init__(self) -> None:
        self.now = 0.0
        self.coordinator: Coordinator
        self.config: CoordinatorConfig
        self.silent: set[str] = set()
        self.vitals: dict[int, dict[str, str]] = {}

    def run(self, command: str) -> list[str]:
        """Effects of one command as lines."""
        words = command.split()
        match words[0]:
            case "config":
                return self._configure(dict(word.split("=", 1) for word in words[1:]))
            case "at":
                self.now = float(words[1])
                return []
            case "start":
                self._start()
                return [f"state {self.coordinator.state.value}"]
            case "lost":
                return self._handle(NodeLost(node=words[1], reason=" ".join(words[2:])))
            case "silence":
                self.silent.add(words[1])
                return []
            case "tick":
                lines: list[str] = []
                for node in list(self.coordinator.job.members.members):
                    if node not in self.silent:
                        heartbeat = m.Heartbeat(node=node, vitals=self._vitals_of(node))
                        lines += self._handle(FromNode(node=node, message=heartbeat))
                return lines + self._handle(Tick())
            case "until":
                return self._until(float(words[1]))
            case "vital":
                rank = int(words[1])
                self.vitals[rank] = self.vitals.get(rank, {}) | dict(word.split("=", 1) for word in words[2:])
                return []
            case "operator":
                return self._handle(FromOperator(message=self._message("", words[1], words[2:])))
            case node:
                return self._handle(FromNode(node=node, message=self._message(node, words[1], words[2:]), connection=7))

    def _configure(self, given: dict[str, str]) -> list[str]:
        layout = plain_layout(
            ranks_per_node=int(given.get("rpn", "1")),
            tensor_parallel=int(given.get("tp", "1")),
            data_parallel=int(given.get("dp", "1")),
            pipeline_parallel=int(given.get("pp", "1")),
        )
        faults = [value for key, value in given.items() if key.startswith("fault")]
        policy: dict[str, object] = {"on_mismatch": given["on_mismatch"]} if "on_mismatch" in given else {}
        if "swap_slower_than" in given:
            policy["swap_slower_than"] = float(given["swap_slower_than"])
        if "transient_limit" in given:
            policy["transient_limit"] = int(given["transient_limit"])
        job = m.JobSpec(
            job_id="job",
            argv=("train.py",),
            cwd="/",
            env={},
            layout=layout,
            policy=policy,
            faults=tuple(fault.to_dict() for fault in parse_faults(faults)),
        )
        self.config = CoordinatorConfig(job=job, nodes=int(given["nodes"]), spares=int(given.get("spares", "0")))
        self.coordinator = Coordinator(self.config)
        return [f"replicas {self.coordinator.job.replica_map}"]

    def _until(self, end: float) -> list[str]:
        """Each tick that has effects, under its time."""
        lines: list[str] = []
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            effects = self.run("tick")
            lines += [f"[{self.now:g} s]", *effects] if effects else []
        return lines

    def _vitals_of(self, node: str) -> tuple[m.Vital, ...]:
        job = self.coordinator.job
        if node not in job.members.seat_nodes:
            return ()
        return tuple(
            vital(rank, job.generation, self.vitals[rank]) for rank in job.members.seats_of(node) if rank in self.vitals
        )

    def _start(self) -> None:
        for index in range(self.config.nodes + self.config.spares):
            self.run(f"n{index} Hello")
        for index in range(self.config.nodes + self.config.spares):
            self.run(f"n{index} NodeReady")
        seat_nodes = self.coordinator.job.members.seat_nodes
        for rank, node in enumerate(seat_nodes):
            self.run(f"{node} WorkerSeated rank={rank} pid={100 + rank}")
        self.run(f"{seat_nodes[0]} StoreReady rank=0")
        for rank, node in enumerate(seat_nodes):
            self.run(f"{node} SpecDeclared rank={rank}")
        for node in dict.fromkeys(seat_nodes):
            self.run(f"{node} Committed version=0.0")

    def _message(self, node: str, name: str, words: list[str]) -> Any:
        given = dict(word.split("=", 1) for word in words)
        generation = int(given.get("generation", self.coordinator.job.generation))
        rank = int(given.get("rank", "0"))
        where = {"generation": generation, "rank": rank}
        match name:
            case "Hello":
                address = m.NodeAddress(node=node, host="host", port=1)
                process = given.get("process", "p1")
                return m.Hello(
                    node=node, pid=1, workers=int(given.get("workers", "8")), address=address, process=process
                )
            case "Leaving":
                return m.Leaving(node=node, reason=given["reason"])
            case "NodeReady":
                return m.NodeReady(node=node)
            case "WorkerSeated":
                return m.WorkerSeated(**where, pid=int(given.get("pid", "1")), start_ticks=int(given.get("pid", "1")))
            case "SpecDeclared":
                return m.SpecDeclared(generation=generation, spec=spec(rank), facts={"of": rank})
            case "StoreReady":
                return m.StoreReady(**where, host="host", port=2)
            case "CollectiveFailed":
                return m.CollectiveFailed(**where, detail=given.get("detail", "reset"))
            case "WorkerExited":
                error = given.get("script_error", "").replace("_", " ")
                return m.WorkerExited(
                    **where,
                    status=int(given.get("status", "0")),
                    script_error=error,
                    cause=given.get("cause", "script" if error else ""),
                    iteration=int(given["iteration"]) if "iteration" in given else None,
                )
            case "FenceDone":
                return m.FenceDone(node=node, generation=generation)
            case "FenceAck":
                return m.FenceAck(
                    node=node,
                    generation=generation,
                    workers=workers(given.get("workers", "")),
                    own=slots(given.get("own", "")),
                    hosted=slots(given.get("hosted", "")),
                )
            case "Constructed":
                return m.Constructed(**where, solo_ops=5, remote_ops=0)
            case "Fetched":
                return m.Fetched(**where, nbytes=1000, seconds=0.1)
            case "FetchFailed":
                return m.FetchFailed(**where, source_node=given["source"], detail="crc32c differs")
            case "ReplicaMismatch":
                lists = {name: tuple(int(r) for r in given.get(name, "").split(",") if r) for name in SEATS}
                return m.ReplicaMismatch(
                    **where, version=version(given["version"]), digests=("a", "b"), reason="they differ", **lists
                )
            case "SlotCorrupt":
                return m.SlotCorrupt(**where, version=version(given["version"]), detail="crc32c differs")
            case "Rebuilt":
                return m.Rebuilt(**where, groups=3)
            case "Restored":
                return m.Restored(**where, nbytes=1000, params_digest=given.get("digest", "d"))
            case "StepDone":
                record = {"iteration": int(given["iteration"]), "lm_loss": 2.5}
                return m.StepDone(**where, record=record | ({"generation": int(given["of"])} if "of" in given else {}))
            case "Committed":
                return m.Committed(node=node, generation=generation, version=version(given["version"]))
            case "TrainingFinished":
                return m.TrainingFinished(**where, iteration=int(given["iteration"]), digests={"weights": "w"})
            case "PauseAck":
                return m.PauseAck(**where, after=int(given["after"]), captured=int(given["captured"]))
            case "Paused":
                return m.Paused(**where, iteration=int(given["iteration"]))
            case "OperatorRequest":
                named = {name: given[name] for name in ("node", "to", "spec") if name in given}
                return m.OperatorRequest(request="r", command=given["command"], arguments=named)
            case "HealthReport":
                bad = given.get("bad", "").replace("_", " ")
                finding = m.Finding(check="device", ok=not bad, fatal=given.get("fatal") != "no", detail=bad)
                number = int(given.get("number", "0"))
                return m.HealthReport(node=node, number=number, findings=(finding,), seconds=0.01)
            case "Inspected":
                stack = tuple(frame.replace("_", " ") for frame in given.get("stack", "").split("|") if frame)
                problem = given.get("problem", "").replace("_", " ")
                return m.Inspected(node=node, rank=rank, number=int(given["number"]), stack=stack, problem=problem)
            case "FaultReached":
                return m.FaultReached(fault_id=int(given["id"]), node=node, rank=rank)
            case "OperatorHello":
                return m.OperatorHello(name="launcher", nodes=tuple(self.coordinator.job.members.members))
            case "Struck":
                return m.Struck(
                    fault={"id": int(given["id"])}, node=given["node"], rank=None, mono=float(given["mono"])
                )
        raise AssertionError(f"unknown message {name}")

    def _handle(self, event: Any) -> list[str]:
        return [line for effect in self.coordinator.handle(event, self.now) if (line := show(effect))]


def show(effect: Effect) -> str:
    """One effect as one line; empty for status."""
    match effect:
        case Send():
            return f"-> {effect.node} {show_message(effect.message)}"
        case SendOperators():
            return f"-> operators {show_message(effect.message)}"
        case Refuse():
            return f"refuse {effect.node} on {effect.connection}: {effect.reason}"
        case Disconnect():
            return f"disconnect {effect.node}"
        case Log():
            where = "".join(
                f" {name}={value}"
                for name, value in (("node", effect.node), ("rank", effect.rank))
                if value is not None
            )
            mono = f" mono={effect.mono:g}" if effect.mono is not None else ""
            return f"log g{effect.generation} {effect.event}{where}{mono}{_fields(effect.fields)}"
        case WriteStep():
            return f"step{_fields(effect.record)}"
        case WriteFinal():
            content = effect.content
            seats = [f"{seat['rank']}@{seat['node']}" for seat in content["seats"]]
            return (
                f"final code={content['code']} iterations={content['iterations']} "
                f"generations={content['generations']} replayed={content['replayed_steps']} seats={','.join(seats)}"
            )
        case WriteStatus():
            return ""
        case Exit():
            return f"exit {effect.code}: {effect.reason}"


def show_message(message: Any) -> str:
    name = type(message).__name__
    match message:
        case m.Welcome():
            return f"{name} spare={message.spare}"
        case m.Assign():
            return f"{name} g{message.generation} seats={list(message.seats)} solo={message.solo}"
        case m.Replicate():
            return f"{name} g{message.generation} seats={','.join(message.seat_nodes)}"
        case m.Recover():
            return f"{name} {show_plan(message.plan)}"
        case m.Fence():
            return f"{name} g{message.generation} lost={','.join(message.lost_nodes) or '-'}: {message.reason}"
        case m.Strike():
            return f"{name} fault={message.fault['id']} {message.fault['kind']} node={message.node}"
    return name + "".join(f" {field}={getattr(message, field)}" for field in message.__dataclass_fields__)


def show_plan(plan: RecoveryPlan) -> str:
    seats = []
    for seat in plan.seats:
        source = seat.source.value + (f"<-{seat.source_node}" if seat.source_node else "")
        seats.append(f"{seat.rank}@{seat.node}{'*' if seat.new_worker else ''}:{source}")
    return f"g{plan.generation} target={plan.target.v}.{plan.target.lineage} {' '.join(seats)}"


def _fields(fields: dict[str, Any]) -> str:
    return "".join(f" {key}={value}" for key, value in fields.items() if key != "detected_mono")


def play(text: str) -> str:
    """The transcript with the effects that its commands really have."""
    transcript = Transcript()
    blocks: list[str] = []
    for block in text.strip("\n").split("\n\n"):
        commands = block.split("\n----")[0].splitlines()
        effects = [
            line
            for command in commands
            if command.strip() and not command.startswith("#")
            for line in transcript.run(command)
        ]
        blocks.append("\n".join([*commands, *(["----", *effects] if effects else [])]))
    return "\n\n".join(blocks) + "\n"
