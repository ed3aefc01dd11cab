"""Metadata survives the round trip exactly, and what would not is refused."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.hotswap.state import codec

_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(_values)
def test_plain_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    back = codec.decode(codec.encode(value))
    assert repr(back) == repr(value)  # repr tells 1 from True and a tuple from a list


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_tensors_keep_dtype_shape_and_bits(dtype: torch.dtype) -> None:
    tensor = (torch.arange(6) % 2).reshape(2, 3).to(dtype)
    back = codec.decode(codec.encode({"x": (tensor, torch.empty(0, dtype=dtype))}))["x"]
    assert back[0].dtype == dtype and torch.equal(back[0], tensor)
    assert back[1].shape == (0,)


def test_generator_states_continue_the_same_sequence() -> None:
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    expected = (random.random(), np.random.rand(), torch.rand(3))
    python, numpy, torch_state = codec.decode(codec.encode(states))
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(torch_state)
    assert (random.random(), np.random.rand()) == expected[:2]
    assert torch.equal(torch.rand(3), expected[2])


def test_an_unknown_type_is_refused_with_its_path() -> None:
    with pytest.raises(codec.CodecError, match=r"state\.groups\[1\] has type set"):
        codec.encode({"groups": [1, {2}]})


def test_garbage_is_refused() -> None:
    with pytest.raises(codec.CodecError):
        codec.decode(b"\xc1garbage")
