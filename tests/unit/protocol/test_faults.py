"""Fault specs: what is understood, and the one line for what is not."""

from __future__ import annotations

import pytest

from deadpool_ext.protocol.faults import AVAILABLE, KINDS, FaultSpec, parse_fault, parse_faults
from deadpool_ext.protocol.types import UsageError


def test_by_step_and_phase() -> None:
    fault = parse_fault("kill-node:node=n2,step=5,phase=backward", 3)
    assert fault == FaultSpec(id=3, kind="kill-node", node="n2", step=5, phase="backward")
    assert not fault.timed
    assert FaultSpec.from_dict(fault.to_dict()) == fault


def test_by_time_and_node_index() -> None:
    fault = parse_fault(" kill-node: node=2, after=1.5 ")
    assert (fault.node, fault.after_s, fault.phase, fault.step, fault.timed) == ("n2", 1.5, None, None, True)
    assert parse_fault("kill-node:node=1,step=2", node_names=["a", "b"]).node == "b"
    assert parse_fault("kill-node:node=a,step=2", node_names=["a", "b"]).node == "a"
    assert parse_fault("kill-node:node=a,step=2").phase == "forward"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill-nod:node=1,step=1", "unknown kind 'kill-nod'; kinds: kill-rank"),
        ("", "unknown kind ''"),
        ("fill-disk:node=1,step=1", "fill-disk is not available yet; available: kill-rank"),
        ("kill-rank:step=1", "kill-rank needs rank=R, or node=NAME"),
        ("kill-spare:rank=1,step=1", "kill-spare takes node= (or nothing: the first spare)"),
        ("kill-rank:rank=1,step=1,seconds=3", "kill-rank does not last"),
        ("kill-rank:rank=1,step=1,times=3", "times= goes with step="),
        ("raise-rank:rank=1,after=1,times=3", "times= goes with step="),
        ("kill-rank:rank=1,phase=gate", "say when: step=K"),
        ("kill-node:node=1,stepp=1", "unknown key 'stepp'; keys: rank= node= step= phase= after= seconds= times="),
        ("kill-node:node=1,step=1,phase=sideways", "unknown phase 'sideways'; phases: data forward"),
        ("kill-node:node=1", "say when: step=K"),
        ("kill-node", "kill-node needs node="),
        ("kill-node:step=3", "kill-node needs node="),
        ("kill-node:node=1,rank=2,step=3", "takes node=, not rank="),
        ("kill-node:node=1,step=3,after=2", "contradict each other"),
        ("kill-node:node=1,phase=gate,after=2", "contradict each other"),
        ("kill-node:node=1,step=0", "step=0 must be a whole number of at least 1"),
        ("kill-node:node=1,step=two", "step=two must be a whole number"),
        ("kill-node:node=1,after=-1", "after=-1 must be a number of seconds"),
        ("kill-node:node=1,after=nan", "after=nan must be a number of seconds"),
        ("kill-node:node=1,after=soon", "after=soon must be a number of seconds"),
        ("kill-node:node=1,node=2,step=1", "node= is given twice"),
        ("kill-node:node,step=1", "node= needs a value"),
    ],
)
def test_refusals_are_one_clear_line(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_fault(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_node_is_refused_where_names_are_known() -> None:
    with pytest.raises(UsageError, match="no node 'n7'; nodes: n0 n1, or an index below 2"):
        parse_fault("kill-node:node=n7,step=1", node_names=["n0", "n1"])


def test_several_get_their_position_as_id() -> None:
    faults = parse_faults(["kill-node:node=0,step=1", "kill-node:node=1,step=1"])
    assert [fault.id for fault in faults] == [0, 1]
    with pytest.raises(UsageError, match="given twice"):
        parse_faults(["kill-node:node=0,step=1", "kill-node:node=n0,step=1"])


def test_from_dict_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UsageError, match="unknown keys speed"):
        FaultSpec.from_dict({"id": 0, "kind": "kill-node", "speed": 3})


def test_available_kinds_are_kinds() -> None:
    assert set(AVAILABLE) <= set(KINDS)


def test_on_a_live_run_no_time_means_now() -> None:
    fault = parse_fault("kill-rank:rank=3", live=True)
    assert (fault.timed, fault.after_s, fault.step) == (True, 0.0, None)
    with pytest.raises(UsageError, match="phase= needs step="):
        parse_fault("kill-rank:rank=3,phase=gate", live=True)


def test_kinds_that_last_have_a_default_and_take_another() -> None:
    assert parse_fault("hold-gil:rank=1,step=2").seconds == 30.0
    assert parse_fault("hold-gil:rank=1,step=2,seconds=4").seconds == 4.0


def test_who_watches_for_a_fault() -> None:
    assert parse_fault("kill-spare:step=2").is_at("n0", 0)
    assert not parse_fault("kill-spare:node=4,step=2").is_at("n1", 2)
    assert parse_fault("kill-rank:node=n1,step=2").is_at("n1", 3)
    assert not parse_fault("kill-rank:rank=2,step=2").is_at("n1", 3)
