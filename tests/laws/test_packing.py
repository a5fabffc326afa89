"""Laws of prefix trees, and that networks compute on a packed tree what they compute on its sequences one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cotrain.packing import common_prefix, packs, prefix_tree, tree_mask

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=8)
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def prefixes(sequences):
    return {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}


@given(SEQUENCES)
def test_paths_spell_their_sequences_at_their_positions(sequences):
    tree = prefix_tree(sequences)
    assert len(tree.paths) == len(sequences)
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.token_ids_T[path].tolist() == sequence
        assert tree.positions_T[path].tolist() == list(range(len(sequence)))
        assert tree.parents_T[path].tolist() == [-1, *path.tolist()][: len(sequence)]


@given(SEQUENCES)
def test_a_tree_holds_one_token_per_distinct_prefix(sequences):
    tree = prefix_tree(sequences)
    assert len(tree.token_ids_T) == len(tree.positions_T) == len(tree.parents_T) == len(prefixes(sequences))
    assert all(array.dtype == np.int64 for array in (tree.token_ids_T, tree.positions_T, tree.parents_T, *tree.paths))


@given(SEQUENCES)
def test_parents_come_first_and_subtrees_are_contiguous(sequences):
    tree = prefix_tree(sequences)
    assert (tree.parents_T < np.arange(len(tree.parents_T))).all()
    mask_TT = tree_mask(tree)
    for t in range(len(mask_TT)):
        below = np.flatnonzero(mask_TT[:, t])  # depth first: a token and all that descends from it
        assert below.tolist() == list(range(t, t + len(below)))


@given(SEQUENCES)
def test_a_token_attends_to_itself_and_its_ancestors(sequences):
    tree = prefix_tree(sequences)
    mask_TT = tree_mask(tree)
    assert mask_TT.dtype == np.bool_
    assert mask_TT.sum(axis=1).tolist() == (tree.positions_T + 1).tolist()
    for t in range(len(mask_TT)):
        ancestors, node = set(), t
        while node >= 0:
            ancestors.add(node)
            node = int(tree.parents_T[node])
        assert set(np.flatnonzero(mask_TT[t]).tolist()) == ancestors


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_the_layout_ignores_the_order_of_the_sequences(sequences, random):
    order = list(range(len(sequences)))
    random.shuffle(order)
    tree, other = prefix_tree(sequences), prefix_tree([sequences[i] for i in order])
    np.testing.assert_array_equal(tree.token_ids_T, other.token_ids_T)
    np.testing.assert_array_equal(tree.parents_T, other.parents_T)
    for place, i in enumerate(order):
        np.testing.assert_array_equal(tree.paths[i], other.paths[place])


@given(SEQUENCES)
def test_a_chain_is_what_needs_no_mask(sequences):
    tree = prefix_tree(sequences)
    size = len(tree.parents_T)
    assert tree.is_chain == np.array_equal(tree_mask(tree), np.tri(size, dtype=np.bool_))
    longest = max(sequences, key=len, default=[])
    assert tree.is_chain == all(longest[: len(s)] == s for s in sequences)


def test_a_fork_by_hand():
    tree = prefix_tree([[7, 8, 5], [7, 8], [9], [7, 8, 4, 6], [7, 8, 5]])
    assert tree.token_ids_T.tolist() == [7, 8, 4, 6, 5, 9]
    assert tree.positions_T.tolist() == [0, 1, 2, 3, 2, 0]
    assert tree.parents_T.tolist() == [-1, 0, 1, 2, 1, -1]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 4], [0, 1], [5], [0, 1, 2, 3], [0, 1, 4]]
    assert tree_mask(tree).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_common_prefix_by_hand():
    left = np.array([1, 2, 3])
    for right, shared in (([1, 2, 4], 2), ([1, 2], 2), ([1, 2, 3, 4], 3), ([2], 0), ([], 0)):
        assert common_prefix(left, np.array(right, dtype=np.int64)) == shared


@given(SEQUENCES, st.integers(1, 12))
def test_packs_hold_every_sequence_once_within_their_size(sequences, most):
    result = packs(sequences, most)
    assert sorted(i for pack in result for i in pack) == list(range(len(sequences)))
    sizes = [len(prefixes([sequences[i] for i in pack])) for pack in result]
    assert all(size <= most or len(pack) == 1 for size, pack in zip(sizes, result, strict=True))
    for pack, following in pairwise(result):  # no pack ends before it must
        assert len(prefixes([sequences[i] for i in [*pack, following[0]]])) > most


def tiny(kind):
    torch.manual_seed(3)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="sdpa"))
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, attn_implementation="sdpa"))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_networks_compute_on_a_tree_what_they_compute_on_its_sequences(kind):
    network = tiny(kind)
    assert network.config._attn_implementation == "sdpa"
    stem = [3, 1, 4, 1, 5]
    sequences = [[*stem, 9, 2, 6], [*stem, 9, 2, 7, 7], [*stem, 8], [11, 3, 1], [*stem, 9, 2, 6]]
    tree = prefix_tree(sequences)
    packed_TV = network(
        input_ids=torch.from_numpy(tree.token_ids_T)[None],
        position_ids=torch.from_numpy(tree.positions_T)[None],
        attention_mask=torch.from_numpy(tree_mask(tree))[None, None],
    ).logits[0]

    def loss(logits, i):
        weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
        return (i + 1) * (torch.log_softmax(logits, -1) * weights).sum()

    separate = [network(input_ids=torch.tensor([s])).logits[0] for s in sequences]
    at_paths = [packed_TV[torch.from_numpy(path)] for path in tree.paths]
    for one, other in zip(separate, at_paths, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    parameters = list(network.parameters())
    expected = torch.autograd.grad(sum(loss(x, i) for i, x in enumerate(separate)), parameters)
    found = torch.autograd.grad(sum(loss(x, i) for i, x in enumerate(at_paths)), parameters)
    for one, other in zip(expected, found, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, atol=1e-5 * float(one.abs().max()), rtol=1e-4)


@settings(max_examples=10)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=6))
def test_random_trees_agree_as_well(sequences):
    network = tiny("qwen3")
    tree = prefix_tree(sequences)
    mask_TT = torch.from_numpy(tree_mask(tree))[None, None]
    ids_1T, positions_1T = torch.from_numpy(tree.token_ids_T)[None], torch.from_numpy(tree.positions_T)[None]
    with torch.no_grad():
        packed_TV = network(input_ids=ids_1T, position_ids=positions_1T, attention_mask=mask_TT).logits[0]
        for sequence, path in zip(sequences, tree.paths, strict=True):
            expected = network(input_ids=torch.tensor([sequence])).logits[0]
            torch.testing.assert_close(packed_TV[torch.from_numpy(path)], expected, atol=1e-5, rtol=1e-5)
