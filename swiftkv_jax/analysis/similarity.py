"""Similarity of the hidden states entering a model's layers, and the split that it suggests.

SimScore of a layer is the cosine between its input and a later layer's, averaged over tokens and over all
later layers (SwiftKV paper, equation 1). The suggested split is the smallest from which the score stays above
0.5, which the paper found at about half depth in all its models (section 3.2). It is a first guess: only
distillation shows what a split really costs.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.core.ends import embed
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.scan import angles_and_segments, through
from swiftkv_jax.core.shapes import Float, Int, PyTree, Tokens

THRESHOLD = 0.5
BLOCK = 512  # tokens read at a time


def blocks(
    model: Transformer, tokens: Int[np.ndarray, " n"], most: int = BLOCK
) -> Iterator[tuple[Int[np.ndarray, " block"], int]]:
    """Cut a text into blocks of one length, within `most` and the model's context: (block, number of tokens).

    The last block is padded at its end, where causal attention cannot see the padding.
    """
    size = min(most, len(tokens), model.config.max_position_embeddings)
    for start in range(0, len(tokens), size):
        piece = np.asarray(tokens[start : start + size], np.int32)
        yield np.pad(piece, (0, size - len(piece))), len(piece)


def layer_inputs(model: Transformer, params: PyTree, tokens: Tokens) -> Float[jax.Array, "L B T D"]:
    """The hidden states entering every layer of a standard model, in its dtype."""
    angles, segments = angles_and_segments(model.config, tokens, None, None)
    x = embed(model, params, tokens, None)
    return jnp.concatenate(through(model, params, x, angles, segments, tap=True).streams)


def layer_similarity(
    model: Transformer, params: PyTree, tokens: Int[np.ndarray, " n"], block: int = BLOCK
) -> tuple[Float[np.ndarray, " L"], Float[np.ndarray, "L L"]]:
    """(scores, matrix) of a text: SimScore by layer, and the mean cosine between every two layers' inputs.

    The text is read in blocks of `block` tokens, each by itself. The last layer has no later one: its score
    is NaN.
    """
    if model.plan != model.plan.full:
        raise UsageError("layer similarity is of a standard model: give the teacher, not its student")
    if not len(tokens):
        raise UsageError("layer similarity needs at least one token")

    @jax.jit
    def cosines(params, piece, count):
        x = layer_inputs(model, params, piece[None])[:, 0].astype(jnp.float32)
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        x = jnp.where(jnp.arange(piece.shape[0])[:, None] < count, x, 0)
        return jnp.einsum("ltd,mtd->lm", x, x, precision="highest")

    total = np.zeros((model.config.num_layers,) * 2)
    for piece, count in blocks(model, tokens, block):
        total += np.asarray(cosines(params, piece, count), np.float64)
    matrix = total / len(tokens)
    return scores(matrix), matrix


def scores(matrix: Float[np.ndarray, "L L"]) -> Float[np.ndarray, " L"]:
    """Each layer's mean over the layers after it; NaN for the last."""
    later = [matrix[j, j + 1 :] for j in range(len(matrix))]
    return np.array([row.mean() if row.size else np.nan for row in later])


def suggested_split(scores: Float[np.ndarray, " L"], threshold: float = THRESHOLD) -> int:
    """The smallest split from which every score is above `threshold`. It is at most the last layer, which
    costs nothing to skip."""
    split = len(scores) - 1
    while split > 0 and scores[split - 1] > threshold:
        split -= 1
    return max(1, split)
