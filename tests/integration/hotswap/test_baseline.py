"""Protection changes nothing: protected, launched without it, and upstream's trainer alone compute the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.hotswap.conftest import VARIANTS
from tests.jobs import ROOT, Ended, Job, JobServer
from tests.oracle import recorder


@pytest.mark.parametrize("variant", VARIANTS)
def test_protected_equals_upstream_alone(
    variant: str, arguments: Callable[..., list[str]], undisturbed: Callable[..., Ended], tmp_path: Path
) -> None:
    """The reference imports nothing of the runtime: upstream's trainer with only the device layer."""
    job = {"out": str(tmp_path / "oracle"), "ranks": 8, "argv": arguments(variant)}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    command = [sys.executable, "-W", "ignore", "tests/oracle/record_run.py", "--jobs", str(tmp_path / "jobs.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=200, capture_output=True)
    recorded = recorder.read(tmp_path / "oracle")
    alone = [(step["lm_loss"], step["grad_norm"]) for step in recorded["iterations"][7]]
    protected = undisturbed(variant)
    assert [(step["lm_loss_hex"], step["grad_norm_hex"]) for step in protected.steps()] == alone
    weights = {seat["rank"]: seat["digests"]["parameters"] for seat in protected.final()["seats"]}
    assert weights == {rank: final["parameters"] for rank, final in recorded["final"].items()}


def test_launched_without_protection_computes_the_same(
    jobs: JobServer, arguments: Callable[..., list[str]], undisturbed: Callable[..., Ended], run_dir: Path
) -> None:
    """What upstream prints of each iteration is the same, digit for digit."""
    ended = jobs.run(Job(run_dir=run_dir, argv=arguments("fp32_dropout")))
    assert ended.code == 0, ended.output
    printed = [_printed(job.run_dir) for job in (ended.job, undisturbed("fp32_dropout").job)]
    assert printed[0] == printed[1] and len(printed[0]) == 7


def _printed(run_dir: Path) -> list[str]:
    """Loss and gradient norm columns of upstream's log lines, from the last rank's log."""
    (log,) = run_dir.glob("logs/n3/7.log")
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if " lm loss: " in line]
    columns = ("lm loss:", "grad norm:", "learning rate:", "consumed samples:")
    return ["|".join(part.strip() for part in line.split("|") if part.strip().startswith(columns)) for line in lines]
