"""Errors that only NCCL's communicators know of are reported once a generation; those of an abort are not."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch.distributed as dist

from deadpool_ext.comm.registry import Communicators
from deadpool_ext.comm.torch_patch import patch_torch
from deadpool_ext.comm.watcher import ErrorWatcher


@dataclass
class Fake:
    generation: int = 0
    fenced: bool = False
    found: dict[str, str] = field(default_factory=dict)
    fence_while_asked: bool = False
    asked: int = 0

    def errors(self) -> dict[str, str]:
        self.asked += 1
        self.fenced = self.fenced or self.fence_while_asked
        return self.found


def test_the_first_error_of_each_generation_is_reported() -> None:
    fake, told = Fake(), []
    watcher = ErrorWatcher(fake, lambda generation, detail: told.append((generation, detail)))
    watcher.look()
    assert not told
    fake.found = {"TP 3": "timeout", "DP 1": "communication error"}
    watcher.look()
    watcher.look()
    assert told == [(0, "NCCL reports communication error in group 'DP 1', timeout in group 'TP 3'")]
    fake.generation = 2
    fake.found = {f"group {number}": "timeout" for number in range(6)}
    watcher.look()
    watcher.look()
    assert [generation for generation, _ in told] == [0, 2]
    assert told[1][1].endswith("'group 3' and 2 more")


def test_what_an_abort_leaves_behind_is_no_error() -> None:
    fake = Fake(fenced=True, found={"TP 3": "communication error"})
    watcher = ErrorWatcher(fake, lambda generation, detail: told.append(detail))
    told: list[str] = []
    watcher.look()
    fake.fenced, fake.fence_while_asked = False, True
    watcher.look()
    assert fake.asked == 1 and not told


def test_it_asks_by_itself_until_it_is_stopped() -> None:
    fake, reported = Fake(found={"TP 3": "timeout"}), threading.Event()
    watcher = ErrorWatcher(fake, lambda generation, detail: reported.set(), period_s=0.001)
    watcher.start()
    assert reported.wait(10)
    watcher.stop()
    watcher.stop()


def test_groups_without_an_accelerators_communicator_have_no_error() -> None:
    communicators = Communicators(rank=0, world_size=2, accelerator=False)
    patch = patch_torch(communicators)
    communicators.solo(0)
    dist.init_process_group("gloo")
    assert communicators.errors() == {}
    dist.destroy_process_group()
    assert communicators.close()
    patch.undo()
