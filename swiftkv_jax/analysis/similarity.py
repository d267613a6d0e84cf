"""How alike the streams entering a model's layers are, and the split that suggests.

    python -m swiftkv_jax.analysis.similarity --model DIR --text FILE [--out DIR] [--max-tokens N]

SimScore of a layer is the cosine between its input and a later layer's, averaged over tokens and over all
later layers (SwiftKV paper, equation 1). The rule for the split: the smallest from which the score stays
above 0.5, which the paper found at about half depth in all its models (section 3.2). It is a first guess:
only distillation tells.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.analysis import command, plots
from swiftkv_jax.analysis.flops import flops_table
from swiftkv_jax.checkpoint.hf import from_pretrained
from swiftkv_jax.errors import UsageError
from swiftkv_jax.kernels.causal_attention.api import causal_attention
from swiftkv_jax.kernels.dense import rms_norm
from swiftkv_jax.layers import decoder_layer, keys_values
from swiftkv_jax.model import Transformer, embed, place
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.shapes import Float, Int, PyTree, Tokens
from swiftkv_jax.surgery import standard_stacks
from swiftkv_jax.tokenizer import load_tokenizer

THRESHOLD = 0.5
MIN_TOKENS = 16  # an average over fewer says nothing about the model
BLOCK = 512  # tokens read at a time


def layer_streams(model: Transformer, params: PyTree, tokens: Tokens) -> Float[jax.Array, "L B T D"]:
    """The streams entering every layer of a standard model, in its dtype."""
    config = model.config
    at, segments = place(model, tokens, None, None)

    def body(x, p):
        p, maker, window = p
        k, v = keys_values(config, maker, rms_norm(x, p["input_norm"], config.rms_norm_eps), at)
        return decoder_layer(config, p, x, at, lambda q: causal_attention(q, k, v, segments, window)), x

    stack = (*standard_stacks(params), jnp.array(config.windows, jnp.int32))
    return jax.lax.scan(body, embed(model, params, tokens), stack)[1]


def layer_similarity(
    model: Transformer, params: PyTree, tokens: Int[np.ndarray, " n"], block: int = BLOCK
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
        x = layer_streams(model, params, piece[None])[:, 0].astype(jnp.float32)
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        x = jnp.where(jnp.arange(piece.shape[0])[:, None] < count, x, 0)
        return jnp.einsum("ltd,mtd->lm", x, x, precision="highest")

    block = min(block, len(tokens))
    total = np.zeros((model.config.num_layers,) * 2)
    for start in range(0, len(tokens), block):
        piece = np.asarray(tokens[start : start + block], np.int32)
        padded = np.pad(piece, (0, block - len(piece)))  # at the end, where causal attention cannot see it
        total += np.asarray(cosines(params, padded, len(piece)), np.float64)
    matrix = total / len(tokens)
    return scores(matrix), matrix


def scores(matrix: Float[np.ndarray, "L L"]) -> Float[np.ndarray, " L"]:
    """Each layer's mean over the layers after it; NaN for the last."""
    later = [matrix[j, j + 1 :] for j in range(len(matrix))]
    return np.array([row.mean() if row.size else np.nan for row in later])


def suggested_split(scores: Float[np.ndarray, " L"], threshold: float = THRESHOLD) -> int:
    """The smallest split from which every score is above `threshold`; at most the last layer, which is
    free."""
    split = len(scores) - 1
    while split > 0 and scores[split - 1] > threshold:
        split -= 1
    return max(1, split)


def read_tokens(path: Path, encode, limit: int, vocab: int) -> Int[np.ndarray, " n"]:
    """The first `limit` token ids of a UTF-8 text file.

    Raises:
      UsageError: unreadable, not text, too short, or ids that the model does not know.
    """
    if limit < MIN_TOKENS:
        raise UsageError(f"--max-tokens must be at least {MIN_TOKENS}, not {limit}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    tokens = np.asarray(encode(text)[:limit], np.int32)
    if len(tokens) < MIN_TOKENS:
        raise UsageError(f"{path} holds {len(tokens)} token(s); give a text of at least {MIN_TOKENS}")
    if tokens.max() >= vocab:
        raise UsageError(
            f"token id {tokens.max()} is outside the model's vocabulary of {vocab}: another tokenizer?"
        )
    return tokens


def report(model_path: str, text: Path, out: Path, max_tokens: int) -> dict:
    """Measure, print, write similarity.json and similarity.png into `out`; returns what the JSON holds."""
    if not text.is_file():
        raise UsageError(f"text file {text} does not exist")
    model, params = from_pretrained(model_path)
    config = model.config
    tokens = read_tokens(text, load_tokenizer(model_path).encode, max_tokens, config.vocab_size)
    by_layer, matrix = layer_similarity(model, params, tokens, min(BLOCK, config.max_position_embeddings))
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
    command.save(result, out / "similarity.json")
    print(f"saved {out / 'similarity.json'} and {out / 'similarity.png'}")
    return result


def main(argv: list[str] | None = None) -> int:
    """The command line; exit code 0, 2 for bad input, 1 when the results cannot be written."""
    about = "How alike the streams entering a model's layers are, and the split that suggests."
    p = command.parser("similarity", about, "a standard model: a folder, or a hub id")
    return command.run(p, argv, lambda args: report(args.model, args.text, args.out, args.max_tokens))


if __name__ == "__main__":
    sys.exit(main())
