"""How many tiles of keys a threshold drops from attention's weighted sum on a text, and the error it causes.

    python -m benchmarks.papers.slim_threshold --model DIR [--text FILE] [--tile 64]

Where keys are stored after rotary embedding, each tile must be rotated back before it is summed (Slim
attention, sections 2 and 3). A tile can be dropped if none of its weights reaches the threshold when it is
read: `threshold` of `kernels.k_cache_attention`. A kernel that reads a token's row for all heads can drop
only tiles that no head needs; the tiles that each head could drop by itself are reported beside that.
"""

import argparse
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.analysis.similarity import layer_inputs
from swiftkv_jax.checkpoint.hf import from_pretrained, local_folder
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import Parser, UsageError, exit_code
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.ends import normalised
from swiftkv_jax.core.layers import before, queries
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.rows import FORMS
from swiftkv_jax.core.scan import angles_and_segments
from swiftkv_jax.core.shapes import Array, Float, PyTree
from swiftkv_jax.kernels.common.mask import capped
from swiftkv_jax.slim import texts

THRESHOLDS = (1e-4, 1e-3, 1e-2)
WAYS = ("all heads", "each head")


def parser() -> Parser:
    """The flags."""
    about = "Measure how many keys a threshold on attention weights would skip."
    p = Parser(prog="python -m benchmarks.papers.slim_threshold", description=about)
    p.add_argument("--model", required=True, metavar="DIR", help="a standard model: folder, or hub id")
    p.add_argument("--text", metavar="FILE", help=".jsonl or .txt (the demo's corpus)")
    p.add_argument("--tile", type=int, default=64, metavar="N", help="keys of a tile (64)")
    return p


def left_out(
    scores: Float[Array, "N T S"], values: Float[Array, "S N U"], real, tile: int, threshold: float
) -> Float[Array, "2 4"]:
    """For each of WAYS: tiles left out, tiles seen, and the squared error and squared norm of the heads'
    output.

    scores: of queries T, -inf where a key is not seen. real: [T] whether a query counts.
    """
    spare = -scores.shape[-1] % tile
    tiles = jnp.pad(scores, ((0, 0), (0, 0), (0, spare)), constant_values=-jnp.inf)
    top = tiles.reshape(*tiles.shape[:2], -1, tile).max(-1)
    reached = jnp.exp(top - jax.lax.cummax(top, axis=2))  # the tile's largest weight when it is read
    shares, whole = jax.nn.softmax(scores), real[:, None, None]

    def mixed(kept):
        each = jnp.repeat(kept, tile, axis=-1)[..., : scores.shape[-1]]
        return jnp.einsum("nts,snu->tnu", shares * each, values, precision="highest") * whole

    def one(kept):
        seen = (top > -jnp.inf) & real[:, None]
        want = mixed(jnp.ones_like(kept))
        counts = jnp.sum(seen & ~kept), jnp.sum(seen), jnp.sum((mixed(kept) - want) ** 2), jnp.sum(want**2)
        return jnp.stack([x.astype(jnp.float32) for x in counts])

    by_head = reached >= threshold
    return jnp.stack([one(jnp.broadcast_to(by_head.any(0), by_head.shape)), one(by_head)])


@partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(model: Transformer, layer: int, tile: int, params: PyTree, x, at, real) -> Float[Array, "F 2 4"]:
    """`left_out` of one layer for each of THRESHOLDS, summed over the pieces of a batch."""
    config, form, p = model.config, FORMS["kv"], weights.layer(params, layer)["attentions"][0]
    row, at = weights.row(params, layer), at.of(config, layer)
    h = normalised(model, params, False, layer, x)
    keys, values = form.keys_values(config, {}, form.make(config, row, h, at), at)
    q = queries(config, p, before(config, p, x), at)
    keys, values = (jnp.repeat(y, config.num_heads // config.num_kv_heads, axis=2) for y in (keys, values))
    scores = jnp.einsum("btnh,bsnh->bnts", q, keys, precision="highest") * config.head_dim**-0.5
    scores = capped(scores, config.attention_softcap)
    back = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
    scores = jnp.where((back >= 0) & (back < config.windows[layer]), scores, -jnp.inf)
    dropped = (jax.vmap(partial(left_out, tile=tile, threshold=threshold)) for threshold in THRESHOLDS)
    return jnp.stack([count(scores, values, real).sum(0) for count in dropped])


def measure(model: Transformer, params: PyTree, kept: texts.Pieces, tile: int) -> list[dict]:
    """For each of THRESHOLDS and WAYS: the share of tiles left out, and the relative error of the heads'
    output, over all layers."""
    total = np.zeros((len(THRESHOLDS), len(WAYS), 4))
    alone = weights.split_layers(model.config, model.plan, params)
    for batch in kept.batches():
        tokens = jnp.asarray(batch.tokens)
        at = angles_and_segments(model.config, tokens, None, None)[0]
        entering = layer_inputs(model, params, tokens)
        for layer in range(model.config.num_layers):
            sums = _layer(model, layer, tile, alone, entering[layer], at, jnp.asarray(batch.real))
            total += np.asarray(sums, np.float64)
    return [
        {"threshold": threshold, "way": way, "left_out": float(n / of), "error": float((off / size) ** 0.5)}
        for threshold, rows in zip(THRESHOLDS, total, strict=True)
        for way, (n, of, off, size) in zip(WAYS, rows, strict=True)
    ]


def report(args: argparse.Namespace) -> None:
    """Measure and print."""
    integer("--tile", args.tile, 1)
    folder = local_folder(args.model)
    with working(show, f"reading {args.model}"):
        model, params = from_pretrained(folder, dtype="float32", slim=False)
    if model.plan != KVPlan.standard(model.config.num_layers):
        raise UsageError("a threshold is measured on a standard model: give the teacher, not its student")
    with working(show, f"reading {args.text or texts.DEFAULT.name}"):
        _, kept = texts.read(args.text, folder, model.config)
    with working(show, "measuring"):
        rows = measure(model, params, kept, args.tile)
    print(f"{kept.count} tokens in pieces of {kept.tokens.shape[1]}; tiles of {args.tile} keys")
    print("threshold  way         left out      error")
    for row in rows:
        print(f"{row['threshold']:9.0e}  {row['way']:10} {row['left_out']:9.1%}  {row['error']:9.1e}")


def main(argv: list[str] | None = None) -> int:
    """The command line; exit code 0, 2 for bad input, 1 for a failure."""
    return exit_code(lambda: report(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
