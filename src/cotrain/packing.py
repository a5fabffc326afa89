"""Prefix trees: token sequences laid out so that what they share goes through a model once.

Guarantees: a tree holds one token per distinct prefix of its sequences, parents before children, and a model that is
given its positions and its mask computes at every token what it computes for the separate sequence.
Does not touch tensors: numpy arrays out, the caller moves them. Models with sliding windows or recurrent layers, which
order tokens by their place in memory, cannot be packed this way.

Legend: T tokens of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixTree:
    """T tokens in depth-first order, and where each sequence lies among them.

    `positions_T` counts from 0 within a sequence; `parents_T` is the index of the token before, -1 at a first token;
    `paths[i]` holds the index in T of every token of sequence i.
    """

    token_ids_T: Ints
    positions_T: Ints
    parents_T: Ints
    paths: tuple[Ints, ...]

    @property
    def is_chain(self) -> bool:
        """True when no token has a sibling: the plain causal mask is the tree's mask."""
        return bool(np.array_equal(self.parents_T, np.arange(-1, len(self.parents_T) - 1)))


def prefix_tree(sequences: Sequence[Sequence[int]]) -> PrefixTree:
    """Lay sequences of token ids out as a tree in which a common prefix occurs once.

    The layout depends on the set of sequences alone; their order shows in `paths` only. Empty sequences get empty
    paths.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    empty: Ints = np.empty(0, dtype=np.int64)
    paths = [empty] * len(arrays)
    tokens, positions, parents = [empty], [empty], [empty]
    size, previous = 0, None
    for index in sorted(range(len(arrays)), key=lambda i: tuple(sequences[i])):
        # Sorted neighbours share the longest prefix, so what precedes one in the tree is all it can share.
        sequence = arrays[index]
        shared = 0 if previous is None else common_prefix(arrays[previous], sequence)
        fresh = np.arange(size, size + len(sequence) - shared)
        path = np.concatenate([paths[previous][:shared] if previous is not None else empty, fresh])
        tokens.append(sequence[shared:])
        positions.append(np.arange(shared, len(sequence)))
        parents.append(np.concatenate([[-1], path])[shared : len(sequence)])
        paths[index], size, previous = path, size + len(fresh), index
    return PrefixTree(
        token_ids_T=np.concatenate(tokens),
        positions_T=np.concatenate(positions),
        parents_T=np.concatenate(parents),
        paths=tuple(paths),
    )


def common_prefix(left: Ints, right: Ints) -> int:
    """Number of leading tokens that two sequences share."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


def tree_mask(tree: PrefixTree) -> NDArray[np.bool_]:
    """Who may attend to whom, [T, T]: row t is True at t and at its ancestors."""
    size = len(tree.parents_T)
    mask_TT = np.zeros((size, size), dtype=np.bool_)
    starts = np.flatnonzero(tree.parents_T != np.arange(-1, size - 1))
    bounds = [*dict.fromkeys([0, *starts.tolist(), size])]
    # Between two bounds every token follows the one before it: such a run sees its first token's ancestors and itself.
    for start, end in pairwise(bounds):
        parent = tree.parents_T[start]
        if parent >= 0:
            mask_TT[start:end, :start] = mask_TT[parent, :start]
        mask_TT[start:end, start:end] = np.tri(end - start, dtype=np.bool_)
    return mask_TT


def packs(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Share sequences out over trees of at most `max_tokens` tokens each; a longer sequence gets a tree of its own.

    Returns the indices of each tree's sequences. Sequences that share most are neighbours, so they land together;
    which ones do depends on the set of sequences alone.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    result: list[list[int]] = []
    room = -1
    for index in sorted(range(len(arrays)), key=lambda i: tuple(sequences[i])):
        shared = common_prefix(arrays[result[-1][-1]], arrays[index]) if result else 0
        if result and len(arrays[index]) - shared <= room:
            result[-1].append(index)
            room -= len(arrays[index]) - shared
        else:
            result.append([index])
            room = max_tokens - len(arrays[index])
    return result
