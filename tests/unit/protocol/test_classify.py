"""What the death of a worker means."""

from __future__ import annotations

import pytest

from deadpool_ext.protocol.classify import Conclusion, Death, History, Limits, Verdict, same_error

LIMITS = Limits(transients=3, window_s=600.0)


def judge(history: History, death: Death, *, now: float = 0.0, spare: bool = True, fencing: bool = False) -> Verdict:
    return history.judge(death, now, LIMITS, spare=spare, fencing=fencing)


def killed(node: str = "n1") -> Death:
    return Death(rank=2, node=node, generation=0, status=-9)


def raised(
    generation: int, *, cause: str = "script", rank: int = 2, node: str = "n1", iteration: int | None = 5
) -> Death:
    return Death(
        rank=rank,
        node=node,
        generation=generation,
        status=1,
        error=f"ValueError: bad at 0x7f{generation}",
        cause=cause,
        iteration=iteration,
    )


def test_a_killed_worker_is_forked_again_until_there_were_too_many_on_its_node() -> None:
    history = History()
    assert judge(history, killed()).conclusion is Conclusion.RESTART
    assert judge(history, killed("n2")).conclusion is Conclusion.RESTART
    assert judge(history, killed(), now=1.0).conclusion is Conclusion.RESTART
    verdict = judge(history, killed(), now=2.0)
    assert verdict.conclusion is Conclusion.REPLACE
    assert "3 worker deaths within 600 s" in verdict.reason and "signal 9" in verdict.reason


def test_transients_grow_old() -> None:
    history = History()
    for at in (0.0, 1.0, 700.0, 701.0):
        assert judge(history, killed(), now=at).conclusion is Conclusion.RESTART


def test_without_a_spare_a_worn_out_node_stays() -> None:
    history = History()
    assert {judge(history, killed(), spare=False).conclusion for _ in range(6)} == {Conclusion.RESTART}


@pytest.mark.parametrize("cause", ["script", "memory"])
def test_the_same_exception_in_the_same_iteration_after_a_restart_is_the_scripts_own(cause: str) -> None:
    history = History()
    assert judge(history, raised(0, cause=cause)).conclusion is Conclusion.RESTART
    assert judge(history, raised(1, cause=cause, iteration=6)).conclusion is Conclusion.RESTART  # elsewhere: another
    verdict = judge(history, raised(1, cause=cause, rank=7, node="n3"))
    assert verdict.conclusion is Conclusion.STOP
    assert verdict.reason == "ValueError: bad at 0x7f1 (rank 7, in iteration 5, again after a restart)"


def test_ranks_that_raise_together_are_one_blow() -> None:
    history = History()
    assert judge(history, raised(0)).conclusion is Conclusion.RESTART
    # The generation was raised by the first; the second one's word comes while survivors still unwind.
    assert judge(history, raised(1, rank=3), fencing=True).conclusion is Conclusion.RESTART
    assert judge(history, raised(1, rank=3)).conclusion is Conclusion.STOP


def test_an_exception_in_set_up_may_come_while_survivors_unwind() -> None:
    history = History()
    assert judge(history, raised(1, iteration=None), fencing=True).conclusion is Conclusion.RESTART
    assert judge(history, raised(2, iteration=None), fencing=True).conclusion is Conclusion.STOP


def test_exceptions_of_the_script_do_not_wear_a_node_out() -> None:
    history = History()
    for iteration in range(1, 9):
        assert judge(history, raised(iteration, iteration=iteration)).conclusion is Conclusion.RESTART


def test_a_device_error_is_the_nodes_if_it_stays_and_the_scripts_if_it_follows() -> None:
    history = History()
    first = judge(history, raised(0, cause="device"))
    assert (first.conclusion, first.evidence) == (Conclusion.RESTART, "device error")
    assert judge(history, raised(1, cause="device")).conclusion is Conclusion.REPLACE
    assert judge(history, raised(2, cause="device", node="n4")).conclusion is Conclusion.STOP


def test_a_device_error_that_stays_with_no_spare_ends_the_job() -> None:
    history = History()
    judge(history, raised(0, cause="device"), spare=False)
    assert judge(history, raised(1, cause="device"), spare=False).conclusion is Conclusion.STOP


def test_the_kernel_for_lack_of_memory() -> None:
    verdict = judge(History(), Death(rank=0, node="n0", generation=0, status=-9, cause="memory"))
    assert (verdict.conclusion, verdict.evidence) == (Conclusion.RESTART, "oom-kill")
    assert "ran out of memory" in verdict.reason


def test_numbers_and_addresses_do_not_make_another_error() -> None:
    assert same_error("index 17 of 0x7fAB") == same_error("index 3 of 0x12")
    assert same_error("index of") != same_error("index in")
