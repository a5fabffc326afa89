"""Samples survive the store's bytes, bit for bit, and no bytes are taken for samples that could not be."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain.errors import DataError
from cotrain.store.encode import decode_samples, encode_samples, pack_values, unpack_values, version_range
from cotrain.types import Sample
from support_store import sample

BOUND = 1_000_000
numbers = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(min_size=1, max_size=20)


@st.composite
def samples(draw):
    mask = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=40)))

    def at_mask(values):
        return tuple(draw(values) if sampled else 0 for sampled in mask)

    return Sample(
        trajectory_id=draw(names),
        agent=draw(names),
        model="main",
        token_ids=tuple(draw(st.integers(0, 2**31 - 1)) for _ in mask),
        mask=mask,
        logprobs=tuple(map(float, at_mask(numbers))),
        versions=at_mask(st.integers(0, 2**31 - 1)),
        advantages=tuple(map(float, at_mask(numbers))),
        weight=draw(numbers),
    )


def bits(sample):
    """Everything of a sample, floats as their bytes: 0.0 is not -0.0."""
    floats = (*sample.logprobs, *sample.advantages, sample.weight)
    kinds = [type(value) for value in (*sample.token_ids, *sample.mask, *sample.versions, *floats)]
    return sample, struct.pack(f"<{len(floats)}d", *floats), kinds


@given(st.lists(samples(), max_size=4))
def test_samples_come_back_bit_for_bit(given_samples):
    data = encode_samples("main", given_samples, BOUND)
    decoded = decode_samples(data, "main", BOUND, "row")
    assert [bits(one) for one in decoded] == [bits(one) for one in given_samples]
    assert encode_samples("main", decoded, BOUND) == data


@given(st.lists(samples(), max_size=3), st.data())
def test_bytes_that_were_changed_are_refused_or_are_samples(given_samples, data):
    raw = bytearray(zlib.decompress(encode_samples("main", given_samples, BOUND)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_samples(zlib.compress(bytes(raw)), "main", BOUND, "row")
    except DataError:
        return
    again = decode_samples(encode_samples("main", decoded, BOUND), "main", BOUND, "row")
    assert [bits(one) for one in again] == [bits(one) for one in decoded]


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    for stored in (data, zlib.compress(data)):
        with pytest.raises(DataError):
            decode_samples(stored, "main", BOUND, "row")


def test_they_are_compact():
    long = sample(num_tokens=32_000)
    assert len(encode_samples("main", [long], BOUND)) < 32_000 * (4 + 4 + 8 + 8)
    assert len(encode_samples("main", [], BOUND)) < 500


def test_the_bound_holds_both_ways():
    data = encode_samples("main", [sample(num_tokens=1000)], BOUND)
    with pytest.raises(DataError, match="bound is 5000"):
        encode_samples("main", [sample(num_tokens=1000)], 5000)
    with pytest.raises(DataError, match="bound of 5000"):
        decode_samples(data, "main", 5000, "row")


def test_versions_are_those_of_sampled_tokens():
    assert version_range([]) == (None, None)
    assert version_range([sample(version=3), sample(version=1)]) == (1, 3)


scalars = st.one_of(numbers, st.integers(-(2**60), 2**60), st.text(max_size=9), st.none())


@given(st.dictionaries(names, scalars, max_size=5))
def test_metrics_come_back(metrics):
    assert unpack_values(pack_values(metrics, "step 1"), "step 1") == metrics
