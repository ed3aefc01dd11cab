"""Health checks of a node: what is found, and what of it is fatal."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_ext.control.gpus import Gpus
from deadpool_ext.control.health import (
    OomWatch,
    Surroundings,
    check_disk,
    check_gpu,
    check_memory,
    check_script,
    run_checks,
)


def test_all_is_well_here(tmp_path: Path) -> None:
    findings, seconds = run_checks(Surroundings(node="n0", log_dir=str(tmp_path), gpus=Gpus(None)))
    assert [finding.check for finding in findings] == ["memory", "disk", "gpu", "script"]
    assert all(finding.ok for finding in findings)
    assert seconds >= 0


def test_little_memory_is_a_warning(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemAvailable: 102400 kB\n")
    finding = check_memory(Surroundings(node="n0", meminfo=meminfo))
    assert (finding.ok, finding.fatal, finding.detail) == (False, False, "only 100 MB of memory left")


def test_a_log_directory_that_is_gone_is_a_warning(tmp_path: Path) -> None:
    finding = check_disk(Surroundings(node="n0", log_dir=str(tmp_path / "gone")))
    assert not finding.ok and not finding.fatal and "No such file" in finding.detail


@pytest.mark.parametrize(
    ("command", "words"),
    [("echo the link is down; exit 3", "exit code 3: the link is down"), ("nothing-of-this-name", "exit code 127")],
)
def test_the_users_script_is_fatal(command: str, words: str) -> None:
    finding = check_script(Surroundings(node="n0", script=command))
    assert not finding.ok and finding.fatal and words in finding.detail


def test_the_users_script_knows_its_node_and_may_take_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_script(Surroundings(node="n7", script='test "$DEADPOOL_NODE" = n7')).ok
    monkeypatch.setattr("deadpool_ext.control.health.SCRIPT_SECONDS", 0.1)
    assert "not done within 0.1 s" in check_script(Surroundings(node="n0", script="exec sleep 60")).detail


def test_a_check_that_fails_itself_is_a_finding() -> None:
    def check_broken(around: Surroundings) -> Any:
        raise RuntimeError("oops")

    findings, _ = run_checks(Surroundings(node="n0"), (check_broken,))
    assert not findings[0].ok and not findings[0].fatal and "oops" in findings[0].detail


class FakeNvml(SimpleNamespace):
    """Answers as NVML would; only for what follows from an answer, never for a result on a GPU."""

    class NVMLError(Exception):
        pass

    nvmlEventTypeXidCriticalError = 8
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def __init__(self, **answers: Any) -> None:
        super().__init__(remap=(0, 0, 0, 0), ecc=0, events=[], gone=False)
        vars(self).update(answers)

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceRegisterEvents(self, *arguments: Any) -> None:
        pass

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> None:
        if self.gone:
            raise self.NVMLError("GPU is lost")

    def nvmlDeviceGetRemappedRows(self, handle: int) -> Any:
        return self.remap

    def nvmlDeviceGetTotalEccErrors(self, *arguments: Any) -> Any:
        return self.ecc

    def nvmlEventSetWait_v2(self, events: Any, timeout: int) -> Any:
        if not self.events:
            raise self.NVMLError("timeout")
        return SimpleNamespace(device=1, eventData=self.events.pop(0))


@pytest.mark.parametrize(
    ("answers", "fatal", "words"),
    [
        ({}, False, ""),
        ({"ecc": 3}, True, "GPU 0: 3 uncorrectable memory errors"),
        ({"remap": (0, 0, 0, 1)}, True, "cannot be remapped"),
        ({"gone": True}, True, "does not answer: GPU is lost"),
        ({"events": [13]}, False, "GPU 1: XID 13"),
        ({"events": [13, 79]}, True, "GPU 1: XID 79"),
    ],
)
def test_what_the_driver_says(answers: dict[str, Any], fatal: bool, words: str) -> None:
    finding = check_gpu(Surroundings(node="n0", gpus=Gpus(FakeNvml(**answers))))
    assert finding.ok == (not words)
    assert finding.fatal == fatal and words in finding.detail


def test_a_fatal_error_is_not_forgotten() -> None:
    around = Surroundings(node="n0", gpus=Gpus(FakeNvml(events=[79])))
    assert not check_gpu(around).ok
    assert not check_gpu(around).ok


def test_kills_by_the_kernel_are_noticed_once(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 4\noom_kill 2\n")
    watch = OomWatch(events)
    assert not watch.more()
    events.write_text("low 0\noom 5\noom_kill 3\n")
    assert watch.more()
    assert not watch.more()
