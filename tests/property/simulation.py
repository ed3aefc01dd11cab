"""A whole cluster of honest agents around one coordinator machine, in one thread, driven by one seed.

Every choice (which queue moves, who steps, what breaks) comes from the seed; queues are first-in-first-out per
connection and interleave freely. The simulation checks INV-1, INV-2, INV-4 and INV-6 itself, from what nodes really
hold, never from what the machine believes.
"""

from __future__ import annotations

import random
from typing import Any

from deadpool_ext.protocol import messages as m
from deadpool_ext.protocol.config import CoordinatorConfig
from deadpool_ext.protocol.coordinator import Coordinator
from deadpool_ext.protocol.effects import (
    Disconnect,
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
    WriteStep,
)
from deadpool_ext.protocol.layout import node_key
from deadpool_ext.protocol.types import Layout, Rank, SourceKind, Version, WorkerState
from tests.property.simulated_node import Fault, Node, Worker, slots_of, spec_of

TICK_S = 0.1

RECORDS_KEPT = 3


class Cluster:
    def __init__(self, config: CoordinatorConfig, seed: int, faults: list[Fault], iterations: int) -> None:
        self.config, self.iterations = config, iterations
        self.layout: Layout = config.job.layout
        self.random = random.Random(seed)
        self.faults = sorted(faults, key=lambda fault: fault.after)
        self.coordinator = Coordinator(config)
        self.now = 100.0
        self.nodes: dict[str, Node] = {}
        self.exit: Exit | None = None
        self.final: dict[str, Any] | None = None
        self.logs: list[Log] = []
        self.steps: list[dict[str, Any]] = []
        self.answers: dict[str, list[m.OperatorAnswer]] = {}  # by request
        self.before: dict[Version, Version] = {}  # the version that each was computed from
        self.resumed: dict[int, set[Version]] = {}  # generation -> versions that its workers entered training at
        self.actions = 0
        for index in range(config.nodes + config.spares):
            self.join(f"n{index}")

    # ---- outside ---------------------------------------------------------------------------------------------------

    def join(self, name: str, process: str = "") -> None:
        node = self.nodes[name] = Node(name=name)
        node.say(
            m.Hello(
                node=name,
                pid=1,
                workers=self.layout.ranks_per_node,
                address=m.NodeAddress(node=name, host="h", port=1),
                process=process,
            )
        )

    def run(self, limit: int) -> None:
        """Act until the coordinator exits. Raises AssertionError if it does not within ``limit`` actions."""
        while self.exit is None and self.actions < limit:
            self.act()
        assert self.exit is not None, f"no end after {limit} actions, state {self.coordinator.state}"
        assert not self.coordinator.handle(Tick(), self.now), "a stopped machine does nothing"

    def act(self) -> None:
        self.actions += 1
        while self.faults and self.faults[0].after <= self.actions:
            self.strike(self.faults.pop(0))
        choices = [
            *(("in", node) for node in self.reachable() if node.to_node),
            *(("out", node) for node in self.reachable() if node.to_coordinator),
            *(("work", node) for node in self.nodes.values() if node.alive and node.workers),
        ]
        if not choices or self.random.random() < 0.05:
            self.tick()
            return
        kind, node = self.random.choice(choices)
        if kind == "in":
            self.on_message(node, node.to_node.popleft())
        elif kind == "out":
            message = node.to_coordinator.popleft()
            self.tell(node, message)
            if self.exit is None and self.random.random() < 0.05 and not isinstance(message, m.Hello):
                self.tell(node, message)  # a duplicate
        elif not self.work(node) and self.random.random() < 0.3:
            self.tick()  # nothing to do here: let time pass sooner

    def reachable(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive and not node.silent]

    def tell(self, node: Node, message: Any) -> None:
        self.handle(FromNode(node=node.name, message=message))

    def tick(self) -> None:
        self.now += TICK_S
        for node in self.reachable():
            if node.welcome and self.exit is None:
                vitals = tuple(worker.vital(self.layout.world_size, node.board) for worker in node.workers.values())
                self.tell(node, m.Heartbeat(node=node.name, vitals=vitals))
        if self.exit is None:
            self.handle(Tick())

    def handle(self, event: Any) -> None:
        before = (self.coordinator.job.generation, self.coordinator.state)
        effects = self.coordinator.handle(event, self.now)
        assert self.coordinator.job.generation >= before[0], "generations only grow"
        for effect in effects:
            match effect:
                case Send():
                    if (node := self.nodes.get(effect.node)) is not None:
                        node.to_node.append(effect.message)
                case Disconnect():
                    self.nodes[effect.node].alive = False
                case Refuse():
                    self.nodes[effect.node].alive = False
                case Log():
                    self.logs.append(effect)
                case WriteStep():
                    self.steps.append(effect.record)
                case SendOperators() if isinstance(effect.message, m.OperatorAnswer):
                    self.answers[effect.message.request].append(effect.message)
                case WriteFinal():
                    self.final = effect.content
                case Exit():
                    assert effect is effects[-1]
                    self.exit = effect
                case _:
                    pass

    def ask(self, command: str, node: str) -> None:
        """A person's request, as a command line sends it."""
        request = f"{command}-{len(self.answers)}"
        self.answers[request] = []
        self.handle(FromOperator(message=m.OperatorRequest(request=request, command=command, arguments={"node": node})))

    def strike(self, fault: Fault) -> None:
        alive = sorted((node for node in self.nodes.values() if node.alive), key=lambda node: node_key(node.name))
        if not alive:
            return
        node = alive[fault.victim % len(alive)]
        seated = self.coordinator.job.members.seats_of(node.name)
        match fault.kind:
            case "kill":
                self.kill(node)
            case "silence":
                node.silent = True
            case "leave":
                if not seated:
                    self.kill(node)
            case "join":
                self.join(f"j{self.actions}")
            case "return":  # a node that was lost is started anew
                gone = sorted(set(self.coordinator.job.members.gone) & set(self.nodes))
                if gone and not self.nodes[gone[0]].alive:
                    self.join(gone[0], process=f"p{self.actions}")
            case "swap" | "drain" if self.exit is None:
                self.ask(fault.kind, node.name)
            case "exit" if node.workers:
                rank = sorted(node.workers)[fault.victim % len(node.workers)]
                node.workers.pop(rank)
                node.say(m.WorkerExited(rank=rank, generation=node.generation, status=-9))
            case "hang" if node.workers:
                worker = node.workers[sorted(node.workers)[fault.victim % len(node.workers)]]
                worker.hung = worker.phase == "train"
            case "collective" if node.workers:
                rank = sorted(node.workers)[0]
                node.say(m.CollectiveFailed(generation=max(node.generation, 0), rank=rank, detail="reset by peer"))
            case "spoil":
                node.spoilt |= {(rank, version) for rank, slots in node.hosted.items() for version in slots}
            case "spoil_own":
                node.spoilt_own |= {(rank, version) for rank, slots in node.own.items() for version in slots}
            case _:
                pass

    def kill(self, node: Node) -> None:
        node.alive = False
        node.to_node.clear()
        node.to_coordinator.clear()
        if self.exit is None:
            self.handle(NodeLost(node=node.name, reason="connection ended"))

    # ---- agents ----------------------------------------------------------------------------------------------------

    def on_message(self, node: Node, message: Any) -> None:
        match message:
            case m.Welcome():
                node.welcome = True
                node.say(m.NodeReady(node=node.name))
            case m.Shutdown():
                node.alive = False
            case m.CheckHealth():
                sick = node.sick or self.random.random() < 0.02
                finding = m.Finding(check="device", ok=not sick, fatal=True, detail="the simulated device is gone")
                node.say(m.HealthReport(node=node.name, number=message.number, findings=(finding,), seconds=0.1))
            case m.StandDown() if message.generation >= node.generation:
                node.generation, node.frozen = message.generation, True
                node.workers, node.own, node.hosted, node.fetches = {}, {}, {}, set()
                node.plan, node.replicate, node.board = None, None, None
                node.say(m.NodeReady(node=node.name))
            case m.Pause() if message.generation == node.generation:
                self.on_pause(node, message)
            case m.Assign():
                assert message.generation >= node.generation
                node.generation = message.generation
                node.frozen = False if not message.solo else node.frozen
                for rank in message.seats:
                    node.workers[rank] = Worker(
                        rank=rank, seated=message.generation, solo=message.solo, generation=message.generation
                    )
                    node.say(
                        m.WorkerSeated(rank=rank, generation=message.generation, pid=rank + 1, start_ticks=self.actions)
                    )
            case m.Fence() if message.generation > node.generation:
                self.on_fence(node, message)
            case m.Replicate() if message.generation == node.generation:
                self.replicate(node, message)
                for rank, worker in node.workers.items():
                    worker.phase, worker.live = "train", Version(v=0, lineage=0)
                    node.own[rank] = [worker.live]
            case m.Recover() if message.plan.generation == node.generation:
                self.on_recover(node, message)
            case m.HostStore() if message.generation == node.generation:
                node.say(m.StoreReady(generation=message.generation, rank=message.rank, host="h", port=2))
            case m.Rendezvous() if message.generation == node.generation:
                self.on_rendezvous(node)
            case m.Finish() if message.generation == node.generation:
                for rank in sorted(node.workers):
                    node.say(m.WorkerExited(rank=rank, generation=node.generation, status=0))
                node.workers.clear()
            case _:
                pass

    def on_pause(self, node: Node, message: m.Pause) -> None:
        for worker in node.workers.values():
            if worker.hung or worker.phase != "train" or worker.live is None:
                continue
            # The end of an iteration is passed with the beginning of the next one, or when nobody asked to stop there.
            worker.pause, worker.told = message.after, False
            if message.after >= 0:
                ack = {"generation": node.generation, "rank": worker.rank, "after": message.after}
                node.say(m.PauseAck(**ack, captured=worker.passed))

    def on_fence(self, node: Node, message: m.Fence) -> None:
        node.generation, node.frozen, node.board = message.generation, True, None
        node.plan, node.fetches = None, set()
        states = []
        for rank, worker in list(node.workers.items()):
            if worker.phase == "construct" and self.random.random() < 0.5:
                del node.workers[rank]  # stuck in set-up: killed
                continue
            if worker.hung:  # killed too, and that is said unless its restart was asked for with the fence
                del node.workers[rank]
                if not any(isinstance(other, m.Assign) and rank in other.seats for other in node.to_node):
                    node.say(m.WorkerExited(rank=rank, generation=message.generation, status=-9))
                continue
            dirty = worker.live is None or self.random.random() < 0.2
            states.append(WorkerState(rank=rank, live=worker.live, dirty=dirty))
            if dirty:
                worker.live = None
            worker.phase, worker.constructed = "wait", True
            worker.pause, worker.passed = -1, -1
        node.say(m.FenceDone(node=node.name, generation=message.generation))
        node.say(
            m.FenceAck(
                node=node.name,
                generation=message.generation,
                workers=tuple(states),
                own=slots_of(node.own),
                hosted=slots_of(node.hosted),
            )
        )

    def replicate(self, node: Node, message: m.Replicate) -> None:
        node.replicate, node.frozen = message, False
        hosts = {
            rank for rank, peers in enumerate(message.replica_of) if node.name in {message.seat_nodes[p] for p in peers}
        }
        node.hosted = {rank: node.hosted.get(rank, []) for rank in hosts}

    def on_recover(self, node: Node, message: m.Recover) -> None:
        plan = message.plan
        for table in (node.own, node.hosted):
            for rank, slots in table.items():
                table[rank] = [version for version in slots if version <= plan.target]
        fetched_from = {seat.rank for seat in plan.seats if seat.source_node == node.name}
        kept = {rank: list(node.hosted.get(rank, [])) for rank in fetched_from}
        self.replicate(node, message.replicate)
        node.hosted |= kept  # a copy that is still to be fetched stays
        node.plan = plan
        for seat in plan.seats:
            if seat.node != node.name:
                continue
            if seat.source is SourceKind.KEEP and seat.rank in node.workers:  # else: died since; word is under way
                assert node.workers[seat.rank].live == plan.target, "INV-1: kept live tensors are the target"
            if seat.source is SourceKind.REPLICA:
                node.fetches.add(seat.rank)
            else:
                assert plan.target in node.own[seat.rank], "INV-2: the planned slot is sealed"

    def on_rendezvous(self, node: Node) -> None:
        for worker in node.workers.values():
            worker.generation = node.generation
            if node.generation == 0:
                continue
            assert node.plan is not None and not node.fetches, "nobody rebuilds before its state is there"
            if self.finds_own_slot_bad(node, worker):
                continue
            assert node.plan.target in node.own[worker.rank], "INV-2"
            worker.live, worker.phase = node.plan.target, "train"
            worker.pause, worker.passed = -1, node.plan.target.v
            worker.moves += 1
            self.resumed.setdefault(node.generation, set()).add(worker.live)
            assert len(self.resumed[node.generation]) == 1, "INV-1: all resume at one version"
            rank = worker.rank
            node.say(m.Rebuilt(generation=node.generation, rank=rank, groups=3))
            node.say(m.Restored(generation=node.generation, rank=rank, nbytes=1, params_digest="same"))
            if rank == self.layout.world_size - 1:
                self.repeat_steps(node, worker.live)

    def finds_own_slot_bad(self, node: Node, worker: Worker) -> bool:
        """A worker that reads its slot and finds it bad voids it, says so, and waits for another generation."""
        target, rank = node.plan.target, worker.rank
        if (rank, target) not in node.spoilt_own:
            return False
        node.spoilt_own.discard((rank, target))
        node.own[rank] = [version for version in node.own[rank] if version != target]
        worker.live, worker.phase = None, "wait"
        node.say(m.Rebuilt(generation=node.generation, rank=rank, groups=3))
        node.say(m.SlotCorrupt(generation=node.generation, rank=rank, version=target, detail="crc32c differs"))
        return True

    def repeat_steps(self, node: Node, version: Version) -> None:
        """The last records travel with the state: those of a lost process may not have arrived."""
        kept = [version]
        while len(kept) < RECORDS_KEPT and kept[-1] in self.before:
            kept.append(self.before[kept[-1]])
        for one in reversed(kept):
            if one.v > 0:
                self.say_step(node, one)

    def say_step(self, node: Node, version: Version) -> None:
        record = {"iteration": version.v, "generation": version.lineage, "lm_loss": 1.0}
        rank = self.layout.world_size - 1
        node.say(m.StepDone(generation=node.generation, rank=rank, record=record))

    # ---- work ------------------------------------------------------------------------------------------------------

    def work(self, node: Node) -> bool:
        """One small piece of work of one node; False if there was nothing to do."""
        if node.fetches and not node.silent:
            return self.fetch(node, self.random.choice(sorted(node.fetches)))
        worker = node.workers[self.random.choice(sorted(node.workers))]
        if worker.hung:
            return False
        if worker.phase == "construct" and not worker.constructed:
            worker.constructed = True
            node.say(m.SpecDeclared(generation=worker.seated, spec=spec_of(worker.rank), facts={"rank": worker.rank}))
            if worker.solo:
                worker.phase = "wait"
                node.say(m.Constructed(generation=worker.seated, rank=worker.rank, solo_ops=4, remote_ops=0))
            return True
        if not node.frozen and node.replicate is not None and not node.silent:
            actions = self.random.sample([self.seal, self.copy, self.commit, self.step], 4)
            return any(action(node, worker) for action in actions)
        return False

    def fetch(self, node: Node, rank: Rank) -> bool:
        seat = node.plan.seats[rank]
        source = self.nodes[seat.source_node]
        if not source.alive or source.silent or source.generation != node.generation:
            return False
        version = node.plan.target
        if (rank, version) in source.spoilt:
            detail = "crc32c differs"
            node.say(m.FetchFailed(generation=node.generation, rank=rank, source_node=source.name, detail=detail))
        else:
            assert version in source.hosted[rank], "INV-2: the planned copy exists"
            node.own[rank] = [*node.own.get(rank, []), version][-2:]
            node.spoilt_own.discard((rank, version))
            node.say(m.Fetched(generation=node.generation, rank=rank, nbytes=1000, seconds=0.1))
        node.fetches.discard(rank)
        return True

    def peers(self, node: Node) -> list[tuple[Node, Worker]] | None:
        """All workers of the node's generation, or None unless every seat trains in it."""
        assert node.replicate is not None
        found = []
        for rank, name in enumerate(node.replicate.seat_nodes):
            other = self.nodes[name]
            worker = other.workers.get(rank)
            if (
                not other.alive
                or other.silent
                or other.frozen
                or other.generation != node.generation
                or worker is None
                or worker.phase not in ("train", "finished")
                or worker.generation != node.generation
            ):
                return None
            found.append((other, worker))
        return found

    def step(self, node: Node, worker: Worker) -> bool:
        if worker.phase == "train" and worker.live is not None and worker.live.v == worker.pause:
            return self.stand_still(node, worker)
        if worker.phase != "train" or worker.live is None or node.board is None or node.board.v < worker.live.v:
            return False
        peers = self.peers(node)
        if peers is None or any(other.live is None or other.live.v < worker.live.v for _, other in peers):
            return False
        worker.passed = worker.live.v
        if worker.live.v == self.iterations:
            worker.phase = "finished"
            node.say(
                m.TrainingFinished(
                    generation=node.generation, rank=worker.rank, iteration=worker.live.v, digests={"weights": "w"}
                )
            )
            return True
        before, worker.live = worker.live, Version(v=worker.live.v + 1, lineage=node.generation)
        self.before[worker.live] = before
        worker.moves += 1
        node.own[worker.rank] = node.own[worker.rank][-1:]  # the older slot is being written from now on
        return True

    def stand_still(self, node: Node, worker: Worker) -> bool:
        """Between two iterations, as asked, once the one before is sealed."""
        if worker.told or worker.live is None or worker.live not in node.own[worker.rank]:
            return False
        worker.told = True
        node.say(m.Paused(generation=node.generation, rank=worker.rank, iteration=worker.live.v))
        return True

    def seal(self, node: Node, worker: Worker) -> bool:
        if worker.live is None or worker.phase != "train" or worker.live in node.own[worker.rank]:
            return False
        node.own[worker.rank].append(worker.live)
        if worker.live.v != worker.pause and self.random.random() < 0.5:
            worker.passed = worker.live.v
        if worker.rank == self.layout.world_size - 1:
            self.say_step(node, worker.live)
        return True

    def copy(self, node: Node, worker: Worker) -> bool:
        assert node.replicate is not None
        slots = node.own.get(worker.rank)
        if not slots or worker.phase == "construct":
            return False
        for peer in node.replicate.replica_of[worker.rank]:
            host = self.nodes[node.replicate.seat_nodes[peer]]
            ready = host.alive and not host.silent and not host.frozen and host.generation == node.generation
            if ready and host.replicate is not None and slots[-1] not in host.hosted.get(worker.rank, []):
                host.hosted[worker.rank] = [*host.hosted.get(worker.rank, [])[-1:], slots[-1]]
                host.spoilt.discard((worker.rank, slots[-1]))
                return True
        return False

    def commit(self, node: Node, worker: Worker) -> bool:
        peers = self.peers(node)
        if peers is None or worker.live is None:
            return False
        for other, mate in peers:
            if mate.live is None or mate.live.v < worker.live.v or worker.live not in other.own[mate.rank]:
                return False
            for peer in node.replicate.replica_of[mate.rank] if node.replicate else ():
                if worker.live not in self.nodes[node.replicate.seat_nodes[peer]].hosted.get(mate.rank, []):
                    return False
        if node.board is not None and node.board.v >= worker.live.v:
            return False
        node.board = worker.live
        node.say(m.Committed(generation=node.generation, node=node.name, version=worker.live))
        return True
