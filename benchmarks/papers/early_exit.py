"""How often an exit head is right, by its confidence (SwiftKV paper, figure B.1).

    python -m benchmarks.papers.early_exit --model DIR --text FILE [--out DIR] [--max-tokens N] [--bins N]

For each position of a text: the largest probability that the exit head gives to a token, and whether the
whole model has the same most likely token. The share of positions in each bin of probability, and the
agreement within it, say what a lossy threshold would cost in accuracy, and for what share of the tokens it
would skip the upper layers. The overall agreement is the acceptance rate to expect of one greedily drafted
token.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.papers import command, plots
from swiftkv_jax.analysis.plots import save_result
from swiftkv_jax.analysis.similarity import BLOCK, blocks
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.core.ends import embed, exit_logits, logits
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.scan import angles_and_segments, through
from swiftkv_jax.core.shapes import Bool, Float, Int, PyTree

THRESHOLD = 0.95  # the paper's rule
BINS = 20


def measure(
    model: Transformer, params: PyTree, tokens: Int[np.ndarray, " n"], block: int = BLOCK
) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """(the exit head's largest probability, whether its likeliest token is the model's) at every position.

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
        at, segments = angles_and_segments(model.config, piece, None, None)
        depth, count = model.plan.depth, model.plan.num_layers
        below = through(model, params, embed(model, params, piece, None), at, segments, range(depth))
        last = through(model, params, below.x, at, segments, range(depth, count), below.rows).x
        early, final = exit_logits(model, params, below.x)[0], logits(model, params, last)[0]
        return jax.nn.softmax(early).max(-1), jnp.argmax(early, -1) == jnp.argmax(final, -1)

    tops, same = [], []
    for piece, count in blocks(model, tokens, block):
        top, agree = both(params, piece[None])
        tops.append(np.asarray(top)[:count])
        same.append(np.asarray(agree)[:count])
    return np.concatenate(tops), np.concatenate(same)


def by_bin(
    sure: Float[np.ndarray, " n"], agree: Bool[np.ndarray, " n"], bins: int
) -> tuple[Float[np.ndarray, " bins"], Float[np.ndarray, " bins"]]:
    """(share of positions, agreement) in each of `bins` equal bins of [0, 1], the last one closed; the
    agreement of an empty bin is NaN."""
    at = np.minimum((sure * bins).astype(int), bins - 1)
    count = np.bincount(at, minlength=bins)
    right = np.bincount(at, weights=agree, minlength=bins)
    return count / len(sure), np.where(count > 0, right / np.maximum(count, 1), np.nan)


def report(model_path: str, text: Path, out: Path, max_tokens: int, bins: int) -> dict:
    """Measure, print, write early_exit.json and early_exit.png into `out`; returns what the JSON holds."""
    if bins < 1:
        raise UsageError(f"--bins must be at least 1, not {bins}")
    model, params, tokens = command.load(model_path, text, max_tokens)
    with working(show, f"measuring on {len(tokens):,} tokens"):
        sure, agree = measure(model, params, tokens)
    share, agreement = by_bin(sure, agree, bins)
    above = sure > THRESHOLD
    by_bins = {"edges": [round(i / bins, 6) for i in range(bins + 1)]}
    by_bins |= {"share_by_bin": np.round(share, 6).tolist()}
    by_bins |= {"agreement_by_bin": [None if np.isnan(a) else round(float(a), 6) for a in agreement]}
    result = {"model": model_path, "text": str(text), "tokens": len(tokens)}
    result |= {"agreement": round(float(agree.mean()), 6), **by_bins, "threshold": THRESHOLD}
    right = round(float(agree[above].mean()), 6) if above.any() else None
    result |= {"share_above": round(float(above.mean()), 6), "agreement_above": right}
    for i in range(bins):
        right = "     -" if np.isnan(agreement[i]) else f"{agreement[i]:6.3f}"
        low, high = result["edges"][i : i + 2]
        print(f"largest probability {low:.2f} to {high:.2f}: {share[i]:6.1%} of places, agreement {right}")
    print(f"agreement with the whole model: {agree.mean():.4f} of {len(tokens)} places")
    right = f", agreement {agree[above].mean():.4f}" if above.any() else ""
    print(f"above {THRESHOLD}: {above.mean():.1%} of places{right}")
    plots.early_exit(share, agreement, THRESHOLD, out / "early_exit.png")
    return save_result(result, out, "early_exit")


def main(argv: list[str] | None = None) -> int:
    """The command line; exit code 0, 2 for bad input, 1 when the results cannot be written."""
    about = "Measure how often an exit head agrees with its whole model, by confidence."
    p = command.parser("early_exit", about, "a student with an exit head: folder or id")
    p.add_argument("--bins", type=int, default=BINS, metavar="N", help=f"bins of probability ({BINS})")
    return command.run(p, argv, lambda a: report(a.model, a.text, a.out, a.max_tokens, a.bins))


if __name__ == "__main__":
    sys.exit(main())
