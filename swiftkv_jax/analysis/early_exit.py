"""How often an exit head is right, by how sure it is (SwiftKV paper, figure B.1).

    python -m swiftkv_jax.analysis.early_exit --model DIR --text FILE [--out DIR] [--max-tokens N] [--bins N]

For each place of a text: the largest probability that the exit head gives to a token, and whether that token
is the likeliest of the whole model too. The share of places in each bin of probability, and the agreement
within it, say what the lossy rule of a threshold would cost, and what share of the tokens it would spare the
upper layers. The agreement in all is the acceptance that greedy self-speculation can expect of one guess.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.analysis import command, plots
from swiftkv_jax.analysis.similarity import BLOCK, read_tokens
from swiftkv_jax.checkpoint.hf import from_pretrained
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model import Transformer, embed, exit_logits, fill, logits, lower, place, upper
from swiftkv_jax.shapes import Bool, Float, Int, PyTree
from swiftkv_jax.tokenizer import load_tokenizer

THRESHOLD = 0.95  # the paper's rule
BINS = 20


def measure(
    model: Transformer, params: PyTree, tokens: Int[np.ndarray, " n"], block: int = BLOCK
) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """(the exit head's largest probability, whether its likeliest token is the model's) at every place.

    The text is read in blocks of `block` tokens, each by itself.

    Raises:
      UsageError: the model has no exit head, or there are no tokens.
    """
    if not model.config.exit_head:
        raise UsageError(
            "this model has no exit head: train one with train.py --set loss.exit_weight=1.0, "
            "or to_swiftkv(..., exit_head=True)"
        )
    if not len(tokens):
        raise UsageError("early exit is measured on at least one token")

    @jax.jit
    def both(params, piece):
        at, segments = place(model, piece, None, None)
        x = lower(model, params, embed(model, params, piece), at, segments)
        last = upper(model, params, x, fill(model, params, x, at), at, segments)[0]
        early, final = exit_logits(model, params, x)[0], logits(model, params, last)[0]
        return jax.nn.softmax(early).max(-1), jnp.argmax(early, -1) == jnp.argmax(final, -1)

    block = min(block, len(tokens))
    tops, same = [], []
    for start in range(0, len(tokens), block):
        piece = np.asarray(tokens[start : start + block], np.int32)
        padded = np.pad(piece, (0, block - len(piece)))  # at the end, where causal attention cannot see it
        top, agree = both(params, padded[None])
        tops.append(np.asarray(top)[: len(piece)])
        same.append(np.asarray(agree)[: len(piece)])
    return np.concatenate(tops), np.concatenate(same)


def by_bin(
    sure: Float[np.ndarray, " n"], agree: Bool[np.ndarray, " n"], bins: int
) -> tuple[Float[np.ndarray, " bins"], Float[np.ndarray, " bins"]]:
    """(share of places, agreement) in each of `bins` equal bins of [0, 1], the last one closed; the agreement
    of an empty bin is NaN."""
    at = np.minimum((sure * bins).astype(int), bins - 1)
    count = np.bincount(at, minlength=bins)
    right = np.bincount(at, weights=agree, minlength=bins)
    return count / len(sure), np.where(count > 0, right / np.maximum(count, 1), np.nan)


def report(model_path: str, text: Path, out: Path, max_tokens: int, bins: int) -> dict:
    """Measure, print, write early_exit.json and early_exit.png into `out`; returns what the JSON holds."""
    if not text.is_file():
        raise UsageError(f"text file {text} does not exist")
    if bins < 1:
        raise UsageError(f"--bins must be at least 1, not {bins}")
    model, params = from_pretrained(model_path)
    config = model.config
    tokens = read_tokens(text, load_tokenizer(model_path).encode, max_tokens, config.vocab_size)
    sure, agree = measure(model, params, tokens, min(BLOCK, config.max_position_embeddings))
    share, agreement = by_bin(sure, agree, bins)
    above = sure > THRESHOLD
    result = {
        "model": model_path,
        "text": str(text),
        "tokens": len(tokens),
        "agreement": round(float(agree.mean()), 6),
        "edges": [round(i / bins, 6) for i in range(bins + 1)],
        "share_by_bin": np.round(share, 6).tolist(),
        "agreement_by_bin": [None if np.isnan(a) else round(float(a), 6) for a in agreement],
        "threshold": THRESHOLD,
        "share_above": round(float(above.mean()), 6),
        "agreement_above": round(float(agree[above].mean()), 6) if above.any() else None,
    }
    for i in range(bins):
        right = "     -" if np.isnan(agreement[i]) else f"{agreement[i]:6.3f}"
        low, high = result["edges"][i : i + 2]
        print(f"largest probability {low:.2f} to {high:.2f}: {share[i]:6.1%} of places, agreement {right}")
    print(f"agreement with the whole model: {agree.mean():.4f} of {len(tokens)} places")
    right = f", agreement {agree[above].mean():.4f}" if above.any() else ""
    print(f"above {THRESHOLD}: {above.mean():.1%} of places{right}")
    plots.early_exit(share, agreement, THRESHOLD, out / "early_exit.png")
    command.save(result, out / "early_exit.json")
    print(f"saved {out / 'early_exit.json'} and {out / 'early_exit.png'}")
    return result


def main(argv: list[str] | None = None) -> int:
    """The command line; exit code 0, 2 for bad input, 1 when the results cannot be written."""
    about = "How often an exit head agrees with its whole model, by how sure it is."
    p = command.parser("early_exit", about, "a student with an exit head: folder or id")
    p.add_argument("--bins", type=int, default=BINS, metavar="N", help=f"bins of probability ({BINS})")
    return command.run(p, argv, lambda a: report(a.model, a.text, a.out, a.max_tokens, a.bins))


if __name__ == "__main__":
    sys.exit(main())
