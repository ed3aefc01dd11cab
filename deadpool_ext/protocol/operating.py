"""What people ask of a running job: commands by name, answered in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deadpool_ext.protocol import planned
from deadpool_ext.protocol.effects import SendOperators
from deadpool_ext.protocol.injecting import inject
from deadpool_ext.protocol.messages import OperatorAnswer, OperatorRequest, Strike
from deadpool_ext.protocol.state import Job
from deadpool_ext.protocol.types import UsageError

#: Carries a request out, or begins to: answers it itself, raises UsageError, and returns what is to be struck.
Command = Callable[[Job, OperatorRequest, float], list[Strike]]


def answer(job: Job, request: str, text: str, *, ok: bool = True, final: bool = True, **fields: object) -> None:
    """Tell whoever asked; everybody else who listens passes it over."""
    told = OperatorAnswer(request=request, ok=ok, final=final, text=text, fields=dict(fields))
    job.out.append(SendOperators(message=told))


def on_request(job: Job, request: OperatorRequest, now: float) -> list[Strike]:
    """Do what is asked; returns faults to be carried out at once. A refusal is an answer, never an exception."""
    command = COMMANDS.get(request.command)
    try:
        if command is None:
            raise UsageError(f"this job does not know {request.command!r}; it knows {', '.join(COMMANDS)}")
        return command(job, request, now)
    except UsageError as error:
        answer(job, request.request, str(error), ok=False)
        return []


def _inject(job: Job, request: OperatorRequest, now: float) -> list[Strike]:
    text, strikes = inject(job, request.arguments.get("spec", ""), now)
    answer(job, request.request, text)
    return strikes


COMMANDS: Mapping[str, Command] = {"inject": _inject, "swap": planned.swap, "drain": planned.drain}
