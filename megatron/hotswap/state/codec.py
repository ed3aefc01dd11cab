"""Metadata as bytes: a closed, self-describing encoding on top of MessagePack.

Pickle would run code from a peer; plain MessagePack forgets tuples, tensors and large integers. Only the types listed
here pass, anything else is refused with its path, because state that does not survive the round trip would make a
recovered run diverge silently.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from deadpool_ext.protocol.types import DeadpoolError

_TAG = "!"
_INT_LIMIT = 2**63


class CodecError(DeadpoolError):
    """A value that the metadata encoding does not cover, or bytes that are not such an encoding."""


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return value
    if isinstance(value, int):
        value = int(value)
        return value if -_INT_LIMIT <= value < _INT_LIMIT else {_TAG: "i", "v": str(value)}
    if isinstance(value, tuple):
        return {_TAG: "t", "v": [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {_TAG: "d", "v": [[_plain(k, path), _plain(v, f"{path}.{k}")] for k, v in value.items()]}
    if isinstance(value, torch.Tensor):
        host = value.detach().to("cpu").contiguous()
        raw = host.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {_TAG: "T", "dtype": str(host.dtype).removeprefix("torch."), "shape": list(host.shape), "v": raw}
    if isinstance(value, np.ndarray):
        return {_TAG: "N", "dtype": value.dtype.str, "shape": list(value.shape), "v": value.tobytes()}
    if isinstance(value, np.generic):
        return {_TAG: "n", "dtype": value.dtype.str, "v": value.tobytes()}
    raise CodecError(f"metadata {path} has type {type(value).__name__}, which a replica cannot carry")


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value[_TAG]
    if tag == "i":
        return int(value["v"])
    if tag == "t":
        return tuple(_rich(item) for item in value["v"])
    if tag == "d":
        return {_rich(k): _rich(v) for k, v in value["v"]}
    if tag == "T":
        raw = (
            torch.frombuffer(bytearray(value["v"]), dtype=torch.uint8)
            if value["v"]
            else torch.empty(0, dtype=torch.uint8)
        )
        return raw.view(getattr(torch, value["dtype"])).reshape(value["shape"])
    if tag == "N":
        return np.frombuffer(value["v"], dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if tag == "n":
        return np.frombuffer(value["v"], dtype=np.dtype(value["dtype"]))[0]
    raise CodecError(f"unknown tag {tag!r} in metadata")


def encode(value: Any) -> bytes:
    """Encode ``value``; raises :class:`CodecError` naming the path of the first value of another type."""
    return msgspec.msgpack.encode(_plain(value, "state"))


def decode(raw: bytes | memoryview) -> Any:
    """Inverse of :func:`encode`; tensors come back on the CPU."""
    try:
        return _rich(msgspec.msgpack.decode(raw))
    except (msgspec.DecodeError, KeyError) as error:
        raise CodecError(f"not an encoding of metadata: {error}") from error
