"""Drawing tokens: hand values, and that noise inverts the distribution function."""

from __future__ import annotations

import math

import numpy as np
import torch

from cotrain.engines.draw import draw, noise


def drawn(logits, noises, temperature=1.0, top_p=1.0):
    rows = len(noises)
    ids_B, logprobs_B = draw(
        torch.tensor(logits).expand(rows, -1),
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.tensor(noises, dtype=torch.float64),
    )
    assert ids_B.dtype == torch.int64
    assert logprobs_B.dtype == torch.float32
    return ids_B.tolist(), logprobs_B.tolist()


EIGHTHS = [math.log(p) for p in (0.125, 0.5, 0.25, 0.125)]


def test_noise_inverts_the_distribution_function():
    ids, logprobs = drawn(EIGHTHS, [0.0, 0.124, 0.126, 0.624, 0.626, 0.874, 0.876, 1 - 2**-53])
    assert ids == [0, 0, 1, 1, 2, 2, 3, 3]
    np.testing.assert_allclose(np.exp(logprobs), [0.125, 0.125, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125], rtol=1e-6)


def test_temperature_divides_the_logits_and_shows_in_the_log_probs():
    # at temperature 1/2 probabilities are squared: 1/64, 16/64, 4/64, 1/64 -> 1/22, 16/22, 4/22, 1/22
    ids, logprobs = drawn(EIGHTHS, [0.5 / 22, 10 / 22, 18 / 22, 21.5 / 22], temperature=0.5)
    assert ids == [0, 1, 2, 3]
    np.testing.assert_allclose(np.exp(logprobs), [1 / 22, 16 / 22, 4 / 22, 1 / 22], rtol=1e-6)


def test_top_p_cuts_what_may_be_drawn_and_not_what_is_recorded():
    # 0.5 alone falls short of 0.6, with 0.25 it reaches it: renormalised 2/3 and 1/3, in the vocabulary's order
    ids, logprobs = drawn(EIGHTHS, [0.0, 0.66, 0.67, 0.999], top_p=0.6)
    assert ids == [1, 1, 2, 2]
    np.testing.assert_allclose(np.exp(logprobs), [0.5, 0.5, 0.25, 0.25], rtol=1e-6)


def test_top_p_always_keeps_the_likeliest_token():
    assert drawn(EIGHTHS, [0.0, 0.99], top_p=1e-6)[0] == [1, 1]


def test_temperature_zero_is_greedy_and_recorded_at_temperature_one():
    ids, logprobs = drawn(EIGHTHS, [0.0, 0.99], temperature=0.0, top_p=0.1)
    assert ids == [1, 1]
    np.testing.assert_allclose(np.exp(logprobs), [0.5, 0.5], rtol=1e-6)


def test_rows_keep_their_own_settings():
    logits_BV = torch.tensor(EIGHTHS).expand(3, -1)
    ids_B, logprobs_B = draw(
        logits_BV,
        torch.tensor([0.0, 1.0, 0.5]),
        torch.tensor([1.0, 0.6, 1.0]),
        torch.tensor([0.99, 0.99, 21.5 / 22], dtype=torch.float64),
    )
    assert ids_B.tolist() == [1, 2, 3]
    np.testing.assert_allclose(logprobs_B.exp().tolist(), [0.5, 0.25, 1 / 22], rtol=1e-6)


def test_evenly_spread_noise_gives_the_distribution_over_a_large_vocabulary():
    torch.manual_seed(0)
    logits_V = torch.randn(3001) * 3
    rows = 20_000
    noise_B = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    ids_B = torch.cat(
        [
            draw(logits_V.expand(len(part), -1), torch.ones(len(part)), torch.ones(len(part)), part)[0]
            for part in noise_B.split(2000)
        ]
    )
    frequencies_V = torch.bincount(ids_B, minlength=3001) / rows
    # inverting hits every token as often as an evenly spaced grid can: within one point of the grid
    torch.testing.assert_close(frequencies_V.double(), torch.softmax(logits_V.double(), -1), atol=1.1 / rows, rtol=0)


def test_a_token_without_probability_is_never_drawn():
    logits = [-math.inf] * 300 + [0.0, -math.inf, 0.0] + [-math.inf] * 300
    ids, logprobs = drawn(logits, [0.0, 0.499, 0.501, 1 - 2**-53])
    assert ids == [300, 300, 302, 302]
    np.testing.assert_allclose(logprobs, [math.log(0.5)] * 4, rtol=1e-6)


def test_bad_logits_show_as_nan_in_their_row_alone():
    logits_BV = torch.tensor([EIGHTHS, [0.0, math.nan, 0.0, 0.0], [0.0, math.inf, 0.0, 0.0], EIGHTHS])
    half_B = torch.full((4,), 0.3, dtype=torch.float64)
    ids_B, logprobs_B = draw(logits_BV, torch.ones(4), torch.ones(4), half_B)
    assert logprobs_B.isnan().tolist() == [False, True, True, False]
    assert ids_B[[0, 3]].tolist() == [1, 1]


def test_noise_belongs_to_the_key_and_the_place_of_the_token():
    key = (0, 3, "q", "r", 1, 0)
    first = noise(key, 20)
    assert ((first >= 0) & (first < 1)).all()
    np.testing.assert_array_equal(first, noise(key, 20))
    np.testing.assert_array_equal(first[:5], noise(key, 5))
    others = [(0, 3, "q", "r", 1, 1), (0, 3, "q", "r", "1", 0), (0, 3, "q,r", 1, 0), (1, 3, "q", "r", 1, 0)]
    for other in others:
        assert not np.isclose(first, noise(other, 20)).any()
    np.testing.assert_array_equal(first, noise((np.int64(0), 3, "q", "r", True, 0), 20))  # equal keys, equal noise


def test_noise_is_uniform_over_keys():
    values = np.sort([noise((0, i), 1)[0] for i in range(4000)])
    # Kolmogorov-Smirnov distance; 0.0257 is its 1 % critical value for 4000 draws, and the keys are fixed
    assert np.abs(values - (np.arange(4000) + 0.5) / 4000).max() < 0.0257
