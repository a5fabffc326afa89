"""Samples as bytes and back, compact and exact: a safetensors file of flat arrays, compressed. Nothing is executed.

Token ids and the mask have one entry per token; log-probs, versions and advantages one per masked token, since they
are 0 elsewhere. Bytes are untrusted: whatever `decode_samples` returns could have been encoded, and it never unpacks
more than the bound. It does not know which agents a run has, only that their names are text.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from cotrain.errors import DataError
from cotrain.types import Sample

Array = NDArray[Any]
Arrays = dict[str, Array]

MAX_INT = 2**31 - 1
MAX_NAME = 1000
_DTYPES = {
    "lengths": np.int32,
    "token_ids": np.int32,
    "mask": np.uint8,
    "logprobs": np.float64,
    "versions": np.int32,
    "advantages": np.float64,
    "weights": np.float64,
    "names": np.uint8,
}


def encode_samples(model: str, samples: Sequence[Sample], max_bytes: int) -> bytes:
    """One model's samples of a group as bytes; `max_bytes` bounds them before compression.

    Raises:
        DataError: a sample is another model's, its fields differ in length, a value cannot be a sample's, or there is
            too much of it.
    """
    where = f"samples of model {model}"
    for sample in samples:
        _check_sample(sample, model)
    mask = _array(where, "mask", chain.from_iterable(s.mask for s in samples), "b", bool)
    arrays: Arrays = {
        "lengths": np.array([len(s.token_ids) for s in samples], np.int32),
        "token_ids": _integers(where, "token_ids", chain.from_iterable(s.token_ids for s in samples)),
        "mask": np.packbits(mask),
        "weights": _floats(where, "weight", (s.weight for s in samples)),
        "names": _pack_names(model, samples),
    }
    dense: Arrays = {
        "logprobs": _floats(where, "logprobs", chain.from_iterable(s.logprobs for s in samples)),
        "versions": _integers(where, "versions", chain.from_iterable(s.versions for s in samples)),
        "advantages": _floats(where, "advantages", chain.from_iterable(s.advantages for s in samples)),
    }
    for name, values in dense.items():
        if np.any(values[~mask]):
            _refuse(where, f"{name} are not 0 at a token that was not sampled")
        arrays[name] = values[mask]
    size = sum(array.nbytes for array in arrays.values())
    if size > max_bytes:
        _refuse(where, f"{size} bytes, and the store's bound is {max_bytes}", "Raise max_part_bytes, or sample less")
    return zlib.compress(save(arrays), 1)


def decode_samples(data: bytes, model: str, max_bytes: int, where: str) -> tuple[Sample, ...]:
    """The samples that `encode_samples` made these bytes of; `where` names the row in errors.

    Raises:
        DataError: they are not one model's samples: sizes, types, shapes, values or the model's name.
    """
    arrays = _unpack(data, max_bytes, where)
    lengths = np.asarray(arrays["lengths"], np.int64)
    num_samples, num_tokens = len(lengths), len(arrays["token_ids"])
    if np.any(lengths < 1) or lengths.sum() != num_tokens:
        _refuse(where, f"lengths add up to {lengths.sum()} for {num_tokens} tokens")
    if len(arrays["mask"]) != (num_tokens + 7) // 8:
        _refuse(where, f"a mask of {len(arrays['mask'])} bytes for {num_tokens} tokens")
    bits = np.unpackbits(np.asarray(arrays["mask"], np.uint8)).astype(bool)
    mask = bits[:num_tokens]
    num_masked = int(mask.sum())
    if np.any(bits[num_tokens:]):
        _refuse(where, "a mask that is longer than the tokens")
    for name, size in [("weights", num_samples), *((n, num_masked) for n in ("logprobs", "versions", "advantages"))]:
        if len(arrays[name]) != size:
            _refuse(where, f"{len(arrays[name])} {name} where {size} belong")
    _check_values(arrays, where)
    trajectories, agents = _unpack_names(bytes(arrays["names"].tobytes()), model, num_samples, where)
    dense = {name: _spread(arrays[name], mask) for name in ("logprobs", "versions", "advantages")}
    ids, flags, weights = arrays["token_ids"].tolist(), mask.tolist(), arrays["weights"].tolist()
    ends = np.cumsum(lengths).tolist()
    return tuple(
        Sample(
            trajectory_id=trajectories[i],
            agent=agents[i],
            model=model,
            token_ids=tuple(ids[start:end]),
            mask=tuple(flags[start:end]),
            logprobs=tuple(dense["logprobs"][start:end]),
            versions=tuple(dense["versions"][start:end]),
            advantages=tuple(dense["advantages"][start:end]),
            weight=weights[i],
        )
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    )


def version_range(samples: Iterable[Sample]) -> tuple[int | None, int | None]:
    """The oldest and the newest version that sampled a token; None without one."""
    found = {v for s in samples for v, sampled in zip(s.versions, s.mask, strict=True) if sampled}
    return (min(found), max(found)) if found else (None, None)


def stored_bound(max_bytes: int) -> int:
    """The most bytes that `max_bytes` can become: compression adds a little where it finds nothing to save."""
    return max_bytes + max_bytes // 100 + 4096


def pack_values(values: Mapping[str, object], where: str) -> str:
    """Names and scalars as JSON text.

    Raises:
        DataError: a value that is no number, text or None.
    """
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, (int, float, str, type(None))):
            _refuse(where, f"{name!r} is {type(value).__name__}", "Give numbers, texts or None")
    return json.dumps(dict(values))


def unpack_values(text: str, where: str) -> dict[str, float | int | str | None]:
    """What `pack_values` made this text of.

    Raises:
        DataError: it is not a JSON object of scalars.
    """
    values = _json(text, where)
    if not isinstance(values, dict) or not all(isinstance(v, (int, float, str, type(None))) for v in values.values()):
        _refuse(where, "not an object of numbers and texts")
    return values


def _check_sample(sample: Sample, model: str) -> None:
    where = f"sample of {sample.trajectory_id!r:.100}"
    if sample.model != model:
        _refuse(where, f"it is of model {sample.model!r:.100}, not {model!r}")
    fields = [sample.token_ids, sample.mask, sample.logprobs, sample.versions, sample.advantages]
    if not sample.token_ids or len({len(values) for values in fields}) > 1:
        _refuse(where, f"fields of lengths {[len(values) for values in fields]}")
    if not (_is_name(sample.trajectory_id) and _is_name(sample.agent)):
        _refuse(where, f"trajectory {sample.trajectory_id!r:.100} or agent {sample.agent!r:.100} is no name")


def _array(where: str, name: str, values: Iterable[object], kinds: str, dtype: type) -> Array:
    try:
        array = np.array(list(values))
    except (ValueError, OverflowError) as error:
        _refuse(where, f"{name} are no plain values: {error}")
    if not array.size:
        return np.zeros(0, dtype)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        _refuse(where, f"{name} are of type {array.dtype}")
    return array


def _integers(where: str, name: str, values: Iterable[int]) -> Array:
    array = _array(where, name, values, "iu", np.int32)
    if array.size and (array.min() < 0 or array.max() > MAX_INT):
        _refuse(where, f"{name} from {array.min()} to {array.max()}, outside of 0 to {MAX_INT}")
    return array.astype(np.int32)


def _floats(where: str, name: str, values: Iterable[float]) -> Array:
    array = _array(where, name, values, "fiu", np.float64).astype(np.float64)
    if not np.all(np.isfinite(array)):
        _refuse(where, f"{name} that are not finite")
    return array


def _unpack(data: bytes, max_bytes: int, where: str) -> Arrays:
    """The arrays by name, of the right types; bounded while unpacking, so that no small row fills the memory."""
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(data, stored_bound(max_bytes))
    except zlib.error as error:
        _refuse(where, f"cannot be unpacked: {error}")
    if not unpacker.eof or unpacker.unused_data:
        _refuse(where, f"{len(data)} bytes that do not end within the store's bound of {max_bytes}, or are cut short")
    try:
        arrays: Arrays = load(raw)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        _refuse(where, f"not a safetensors file: {error!r:.200}")
    found = {name: (str(array.dtype), array.ndim) for name, array in arrays.items()}
    if found != {name: (np.dtype(dtype).name, 1) for name, dtype in _DTYPES.items()}:
        _refuse(where, f"arrays {str(found)[:300]}")
    return arrays


def _check_values(arrays: Arrays, where: str) -> None:
    for name in ("logprobs", "advantages", "weights"):
        if not np.all(np.isfinite(np.asarray(arrays[name], np.float64))):
            _refuse(where, f"{name} that are not finite")
    for name in ("token_ids", "versions"):
        if np.any(np.asarray(arrays[name], np.int32) < 0):
            _refuse(where, f"{name} below 0")


def _spread(values: Array, mask: Array) -> list[Any]:
    full = np.zeros(len(mask), values.dtype)
    full[mask] = values
    spread: list[Any] = full.tolist()
    return spread


def _pack_names(model: str, samples: Sequence[Sample]) -> Array:
    names = {"model": model, "trajectories": [s.trajectory_id for s in samples], "agents": [s.agent for s in samples]}
    return np.frombuffer(json.dumps(names).encode(), np.uint8)


def _unpack_names(data: bytes, model: str, size: int, where: str) -> tuple[list[str], list[str]]:
    try:
        names = _json(data.decode("ascii"), where)
    except UnicodeDecodeError as error:
        _refuse(where, f"names that are no text: {error}")
    if not isinstance(names, dict) or set(names) != {"model", "trajectories", "agents"}:
        _refuse(where, "names that are not those of samples")
    if names["model"] != model:
        _refuse(where, f"samples of model {names['model']!r:.100}, not {model!r}")
    for values in (names["trajectories"], names["agents"]):
        if not isinstance(values, list) or len(values) != size or not all(map(_is_name, values)):
            _refuse(where, f"names that are not {size} texts of 1 to {MAX_NAME} characters")
    return names["trajectories"], names["agents"]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME


def _json(text: str, where: str) -> object:
    parse: Callable[[str], object] = json.loads
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        _refuse(where, f"not JSON: {str(error)[:200]}")


def _refuse(where: str, found: str, fix: str = "Look for what wrote it; the store takes no such row") -> NoReturn:
    raise DataError(where, found, fix)
