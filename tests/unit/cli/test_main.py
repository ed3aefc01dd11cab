"""The command's frame: what is listed, and what an error looks like."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest

from deadpool_ext import __version__
from deadpool_ext.cli import main as frame
from deadpool_ext.protocol.types import DeadpoolError, InvariantError, UsageError


class _StoppedError(DeadpoolError):
    exit_code = 3


@click.command()
@click.option("--what", type=click.Choice(["usage", "own", "bug", "abort", "exit"]))
@click.pass_context
def provoke(ctx: click.Context, what: str) -> None:
    """Raise what is asked for."""
    if what == "exit":
        ctx.exit(4)
    raise {
        "usage": UsageError("first line\n  second line"),
        "own": _StoppedError("no copy of seats 4 and 5 is left"),
        "bug": InvariantError("INV-1"),
        "abort": click.exceptions.Abort(),
    }[what]


@pytest.fixture
def with_provoke(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "provoke", provoke, raising=False)
    monkeypatch.setattr(frame.cli, "_table", {"provoke": f"{__name__}:provoke", "absent": "deadpool_ext.cli.absent:x"})
    monkeypatch.setattr(frame, "_module_exists", lambda target: "absent" not in target)
    monkeypatch.delenv("DEADPOOL_DEBUG", raising=False)


@pytest.mark.parametrize(
    ("what", "code", "line"),
    [
        ("usage", 2, "deadpool: first line second line\n"),
        ("own", 3, "deadpool: no copy of seats 4 and 5 is left\n"),
        ("bug", 1, "deadpool: INV-1\n"),
        ("abort", 130, "deadpool: interrupted\n"),
        ("exit", 4, ""),
    ],
)
def test_errors_are_one_line_and_a_code(
    with_provoke: None, capsys: pytest.CaptureFixture[str], what: str, code: int, line: str
) -> None:
    assert frame.run(["provoke", "--what", what]) == code
    captured = capsys.readouterr()
    assert captured.err == line
    assert captured.out == ""


def test_debug_shows_the_traceback(with_provoke: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEADPOOL_DEBUG", "1")
    with pytest.raises(UsageError, match="first line"):
        frame.run(["provoke", "--what", "usage"])


def test_absent_modules_are_not_listed(with_provoke: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["--help"]) == 0
    listed = capsys.readouterr().out
    assert "provoke" in listed
    assert "absent" not in listed
    assert frame.run(["absent"]) == 2
    assert capsys.readouterr().err.startswith("deadpool: No such command 'absent'")


@pytest.mark.parametrize("arguments", [["nonsense"], ["compare"], ["compare", "--nonsense"], ["data", "text"]])
def test_usage_errors_point_at_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert frame.run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("deadpool: ")
    assert error.count("\n") == 1
    assert "--help" in error


def test_every_listed_command_loads_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    context = click.Context(frame.cli)
    names = frame.cli.list_commands(context)
    assert {"compare", "data"} <= set(names)
    for name in names:
        assert frame.run([name, "--help"]) == 0, name
        assert capsys.readouterr().out.startswith(f"Usage: deadpool {name}"), name


def test_table_names_this_package_only() -> None:
    assert all(target.startswith("deadpool_ext.cli.") for target in frame.COMMANDS.values())
    assert all(target.endswith(f":{name}") for name, target in frame.COMMANDS.items())


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["--version"]) == 0
    assert capsys.readouterr().out == f"deadpool, version {__version__}\n"


def test_the_frame_does_not_wait_for_torch() -> None:
    code = "import sys, deadpool_ext.cli.main as m; m.run(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                          capture_output=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()


def test_lazy_loading_refuses_what_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame.cli, "_table", {"odd": "json:dumps"})
    with pytest.raises(TypeError, match="not a click command"):
        frame.cli.get_command(click.Context(frame.cli), "odd")
