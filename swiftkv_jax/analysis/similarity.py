"""Similarity of the hidden states entering a model's layers, and the split that it suggests.

    python -m swiftkv_jax.analysis.similarity --model DIR --text FILE [--out DIR] [--max-tokens N]

SimScore of a layer is the cosine between its input and a later layer's, averaged over tokens and over all
later layers (SwiftKV paper, equation 1). The suggested split is the smallest from which the score stays above
0.5, which the paper found at about half depth in all its models (section 3.2). It is a first guess: only
distillation shows what a split really costs.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.analysis import command, plots
from swiftkv_jax.analysis.flops import flops_table
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.ends import embed
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.scan import angles_and_segments, through
from swiftkv_jax.core.shapes import Float, Int, PyTree, Tokens

THRESHOLD = 0.5


def layer_inputs(model: Transformer, params: PyTree, tokens: Tokens) -> Float[jax.Array, "L B T D"]:
    """The hidden states entering every layer of a standard model, in its dtype."""
    at, segments = angles_and_segments(model.config, tokens, None, None)
    x = embed(model, params, tokens, None)
    return jnp.concatenate(through(model, params, x, at, segments, tap=True).streams)


def layer_similarity(
    model: Transformer, params: PyTree, tokens: Int[np.ndarray, " n"], block: int = command.BLOCK
) -> tuple[Float[np.ndarray, " L"], Float[np.ndarray, "L L"]]:
    """(scores, matrix) of a text: SimScore by layer, and the mean cosine between every two layers' inputs.

    The text is read in blocks of `block` tokens, each by itself. The last layer has no later one: its score
    is NaN.

    Raises:
      UsageError: the model is not a standard one, or there are no tokens.
    """
    if model.plan != KVPlan.standard(model.config.num_layers):
        raise UsageError(
            "layer similarity is measured on a standard model: give the teacher, not its SwiftKV student"
        )
    if not len(tokens):
        raise UsageError("layer similarity needs at least one token")

    @jax.jit
    def cosines(params, piece, count):
        x = layer_inputs(model, params, piece[None])[:, 0].astype(jnp.float32)
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        x = jnp.where(jnp.arange(piece.shape[0])[:, None] < count, x, 0)
        return jnp.einsum("ltd,mtd->lm", x, x, precision="highest")

    total = np.zeros((model.config.num_layers,) * 2)
    for piece, count in command.blocks(model, tokens, block):
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


def report(model_path: str, text: Path, out: Path, max_tokens: int) -> dict:
    """Measure, print, write similarity.json and similarity.png into `out`; returns what the JSON holds."""
    model, params, tokens = command.load(model_path, text, max_tokens)
    config = model.config
    with working(show, f"measuring on {len(tokens):,} tokens"):
        by_layer, matrix = layer_similarity(model, params, tokens)
    split, context = suggested_split(by_layer), config.max_position_embeddings
    left = flops_table(config, KVPlan.swiftkv(config.num_layers, split), context)["total"]
    share = left / flops_table(config, None, context)["total"]
    result = {
        "model": model_path,
        "text": str(text),
        "tokens": len(tokens),
        "scores": [None if np.isnan(score) else round(float(score), 6) for score in by_layer],
        "matrix": np.round(matrix, 6).tolist(),
        "threshold": THRESHOLD,
        "suggested_split": split,
        "context": context,
        "prefill_flops_left": round(share, 6),
    }
    for layer, score in enumerate(by_layer[:-1]):
        print(f"layer {layer:3}  SimScore {score:7.4f}" + ("  <- suggested split" if layer == split else ""))
    print(
        f"layer {config.num_layers - 1:3}  (no later layer)"
        + ("  <- suggested split" * (split == len(by_layer) - 1))
    )
    print(f"split {split} of {config.num_layers}: the smallest from which SimScore stays above {THRESHOLD}")
    print(f"prefill FLOPs it would leave at {context} tokens: {100 * share:.1f} %")
    plots.layer_similarity(by_layer, matrix, THRESHOLD, split, out / "similarity.png")
    return command.save(result, out, "similarity")


def main(argv: list[str] | None = None) -> int:
    """The command line; exit code 0, 2 for bad input, 1 when the results cannot be written."""
    about = "Measure how similar the inputs of a model's layers are, and the split that this suggests."
    p = command.parser("similarity", about, "a standard model: a folder, or a hub id")
    return command.run(p, argv, lambda args: report(args.model, args.text, args.out, args.max_tokens))


if __name__ == "__main__":
    sys.exit(main())
