"""Who deviates, by example and against single flips anywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deadpool_ext.protocol.crosscheck import Evidence, judge

RIGHT = 1000


def evidence(count: int, *, fp32: bool = False) -> dict[str, list]:
    """A group of ranks 10, 11, ... in which all is well; ``fp32``: main parameters are the region itself."""
    return {
        "seen": [[RIGHT + region for region in range(count)] for _ in range(count)],
        "main": [RIGHT + region for region in range(count)],
        "intact": [True] * count,
    }


def judged(given: dict[str, list]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    count = len(given["main"])
    judgement = judge(
        Evidence(
            ranks=tuple(range(10, 10 + count)),
            seen=tuple(tuple(row) for row in given["seen"]),
            main=tuple(given["main"]),
            intact=tuple(given["intact"]),
        )
    )
    assert judgement.reason and judgement.reason.startswith("undecided") is not bool(judgement.deviating)
    return judgement.deviating, judgement.spoilt


@given(st.integers(2, 5), st.data())
def test_a_copy_of_another_ranks_parameters_flipped(count: int, data: st.DataObject) -> None:
    """Decided with two ranks too: the owner's main parameters are the second opinion."""
    holder, region = data.draw(st.permutations(range(count)).map(lambda order: order[:2]))
    given = evidence(count)
    given["seen"][holder][region] ^= 1
    assert judged(given) == ((10 + holder,), ())


@given(st.integers(2, 5), st.data())
def test_the_owners_own_copy_flipped(count: int, data: st.DataObject) -> None:
    """With low-precision parameters: main parameters are another tensor, and still right."""
    owner = data.draw(st.integers(0, count - 1))
    given = evidence(count)
    given["seen"][owner][owner] ^= 1
    assert judged(given) == ((10 + owner,), ())


@given(st.integers(2, 5), st.booleans(), st.data())
def test_the_optimizer_state_changed_after_it_was_sealed(count: int, fp32: bool, data: st.DataObject) -> None:
    owner = data.draw(st.integers(0, count - 1))
    given = evidence(count)
    given["intact"][owner] = False
    given["main"][owner] ^= 1
    if fp32:  # main parameters are views of the model's
        given["seen"][owner][owner] ^= 1
    assert judged(given) == ((10 + owner,), ())


@given(st.integers(2, 5), st.data())
def test_a_moment_changed_which_no_parameter_shows(count: int, data: st.DataObject) -> None:
    owner = data.draw(st.integers(0, count - 1))
    given = evidence(count)
    given["intact"][owner] = False
    assert judged(given) == ((10 + owner,), ())


@given(st.integers(2, 5), st.data())
def test_main_parameters_that_were_sealed_wrong_are_not_used(count: int, data: st.DataObject) -> None:
    """All have what was sent; only the owner's main parameters, and so its slot, are something else."""
    owner = data.draw(st.integers(0, count - 1))
    given = evidence(count)
    given["main"][owner] ^= 1
    assert judged(given) == ((10 + owner,), (10 + owner,))


def test_the_majority_is_right_where_the_owner_is_of_no_help() -> None:
    given = evidence(3)
    given["main"][0] = 7  # neither what it holds nor what the others hold
    given["seen"][1][0] ^= 1
    assert judged(given)[0] == (11,)


def test_without_a_majority_nobody_is_blamed() -> None:
    given = evidence(2)
    given["main"][0] = 7
    given["seen"][1][0] ^= 1
    assert judged(given) == ((), ())
    # The full fingerprints differ in something that no region shows.
    assert judged(evidence(2)) == ((), ())


def test_several_are_named_together() -> None:
    given = evidence(4)
    given["seen"][1][0] ^= 1
    given["seen"][2][3] ^= 1
    given["intact"][3] = False
    assert judged(given)[0] == (11, 12, 13)
