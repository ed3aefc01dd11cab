"""One attribute of another module that is replaced by ours, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Substitution:
    """``owner.name = value``. ``owner`` is a module or a class."""

    owner: Any
    name: str
    value: Any


def substitute(substitutions: list[Substitution]) -> None:
    """Carry out all of them. Callers see to it that this happens once and before training threads exist."""
    for each in substitutions:
        setattr(each.owner, each.name, each.value)


def replacing(owner: Any, **values: Any) -> list[Substitution]:
    """Several substitutions on one owner: ``replacing(torch.cuda, is_available=..., synchronize=...)``."""
    return [Substitution(owner=owner, name=name, value=value) for name, value in values.items()]
