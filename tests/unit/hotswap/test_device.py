"""The CPU in CUDA's place. Every test that installs it does so in a child: it is for the whole process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.hotswap import device
from megatron.hotswap.device.tensors import host_device
from tests.isolated import in_child

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(not device.needed(), reason="there is a CUDA device: nothing stands in for it")


def with_device[T](call: Callable[[], T]) -> T:
    def installed() -> T:
        assert device.install(upstream=False)
        return call()

    return in_child(installed)


def test_import_installs_nothing() -> None:
    assert not device.installed()
    assert not torch.cuda.is_available()


def test_nothing_is_installed_beside_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "needed", lambda: False)
    assert not device.install(upstream=False)
    assert not device.installed()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("cuda", "cpu"),
        ("cuda:3", "cpu"),
        (0, "cpu"),
        (torch.device("cuda", 1), "cpu"),
        ("meta", "meta"),
        (torch.device("meta"), "meta"),
        ("cpu", "cpu"),
        (None, None),
    ],
)
def test_device_names(given: Any, expected: str | None) -> None:
    found = host_device(given)
    assert found is None if expected is None else torch.device(found) == torch.device(expected)


def test_tensors_asked_for_on_cuda_are_made_on_the_host() -> None:
    def made() -> set[str]:
        current = torch.cuda.current_device()
        here = torch.ones(2)
        tensors = [
            torch.zeros(2, device="cuda"),
            torch.empty(2, device=current, pin_memory=True),
            torch.tensor([1, 2], device=torch.device("cuda", 0)),
            torch.arange(3, device=current),
            torch.full((2,), 1.0, device=current),
            torch.zeros_like(here, device="cuda"),
            torch.randn(2, device="cuda"),
            here.new_empty((2,), device="cuda"),
            here.to("cuda"),
            here.to(device=current, dtype=torch.bfloat16),
            here.cuda(),
            torch.nn.Linear(2, 2).cuda().weight,
            torch.nn.Linear(2, 2, device="cuda").weight,
        ]
        return {str(t.device) for t in tensors}

    assert with_device(made) == {"cpu"}


def test_other_devices_and_conversions_stay() -> None:
    def made() -> list[str]:
        with torch.device("meta"):
            inside = torch.empty(2)
        here = torch.ones(2)
        return [
            str(torch.empty(2, device="meta").device),
            str(inside.device),
            str(here.to(torch.float64).dtype),
            str(here.to(torch.zeros(1, dtype=torch.int64)).dtype),
        ]

    assert with_device(made) == ["meta", "meta", "torch.float64", "torch.int64"]


def test_it_holds_in_every_thread() -> None:
    def from_another_thread() -> list[str]:
        found: list[str] = []

        def work() -> None:
            found.append(str(torch.zeros(1, device="cuda").device))
            found.append(str(torch.ones(1).to("cuda:0").device))
            torch.cuda.current_stream().wait_stream(torch.cuda.Stream())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
        return found

    assert with_device(from_another_thread) == ["cpu", "cpu"]


def test_one_device_is_announced_and_no_accelerator() -> None:
    def seen() -> tuple[Any, ...]:
        return (
            torch.cuda.is_available(),
            torch.cuda.device_count(),
            torch.cuda.current_device(),
            torch.cuda.get_device_properties("cuda:0").major,
            torch.accelerator.is_available(),
            torch.accelerator.current_accelerator(),
        )

    assert with_device(seen) == (True, 1, 0, 8, False, None)


def test_tensor_types_are_told_as_cuda_types() -> None:
    def seen() -> tuple[Any, ...]:
        here = torch.ones(1)
        return (
            here.type(),
            here.bfloat16().type(),
            isinstance(here, torch.cuda.FloatTensor),
            isinstance(here.half(), torch.cuda.FloatTensor),
            str(here.type("torch.cuda.DoubleTensor").dtype),
            str(here.type(torch.int32).dtype),
        )

    assert with_device(seen) == (
        "torch.cuda.FloatTensor",
        "torch.cuda.BFloat16Tensor",
        True,
        False,
        "torch.float64",
        "torch.int32",
    )


def test_there_is_one_generator() -> None:
    def draws() -> list[bool]:
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4)
        torch.cuda.set_rng_state(state)
        second = torch.rand(4)
        torch.manual_seed(7)
        third = torch.rand(4)
        late: list[int] = []
        torch.cuda._lazy_call(lambda: late.append(1))
        return [torch.equal(first, second), torch.equal(first, third), late == [1]]

    assert with_device(draws) == [True, True, True]


def test_streams_and_events_do_their_work_at_once() -> None:
    def timed() -> tuple[bool, bool]:
        stream = torch.cuda.Stream(priority=-1)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            begin.record()
            end.record(stream)
        torch.cuda.synchronize()
        return begin.elapsed_time(end) >= 0, stream.query() and end.query()

    assert with_device(timed) == (True, True)


def test_building_a_data_iterator_draws_nothing_from_the_training_generator() -> None:
    def unchanged() -> bool:
        loader: Any = torch.utils.data.DataLoader([1, 2, 3], pin_memory=True)
        before = torch.get_rng_state()
        assert [int(item) for item in iter(loader)] == [1, 2, 3]
        return torch.equal(before, torch.get_rng_state())

    assert with_device(unchanged)


def test_installing_twice_changes_nothing() -> None:
    def again() -> bool:
        before = torch.zeros, torch.Tensor.to, torch.cuda.Stream
        device.install(upstream=False)
        return before == (torch.zeros, torch.Tensor.to, torch.cuda.Stream)

    assert with_device(again)


def test_preload_leaves_one_thread_and_no_socket() -> None:
    script = (
        "import os\n"
        "from megatron.hotswap.preload import preload\n"
        "preload()\n"
        "links = [os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')]\n"
        "assert len(os.listdir('/proc/self/task')) == 1, os.listdir('/proc/self/task')\n"
        "assert not [link for link in links if 'socket' in link or link.startswith('/dev/nvidia')], links\n"
        "import torch\n"
        "assert torch.cuda.is_available() and torch.get_num_threads() == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
