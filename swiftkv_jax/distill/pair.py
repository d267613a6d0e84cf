"""Make a KV prediction adapter without training, and measure how close it comes to its base.

    python -m swiftkv_jax.distill.pair --base demo/teacher --keep 0,1,2,3 --text demo/corpus.jsonl.xz \\
        --out runs/pair
    python serve.py --model runs/pair

The auxiliary is some layers of the base (--keep) or a model of its own (--auxiliary); the predictor is fitted
by least squares to the base's rows of the text's training documents, and evaluated on its held-out ones.
"""

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.checkpoint.adapter import check_tokenizers, save_adapter
from swiftkv_jax.checkpoint.hf import from_pretrained, local_folder
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import Parser, UsageError, exit_code
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.config.plan import Prediction
from swiftkv_jax.core import predict, surgery
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.shapes import Array, PyTree
from swiftkv_jax.distill.config import MAPS, STARTS, PredictConfig
from swiftkv_jax.distill.data.loader import Batch, DataConfig, DataLoader, evaluation_batches
from swiftkv_jax.distill.fit_predictor import fit
from swiftkv_jax.text.tokenizer import load_tokenizer

_HELD_OUT = 6  # held-out batches


class Nearness(NamedTuple):
    """First tokens compared with the base's, over prompts of every length; in nats, except `agreement`.

    Attributes:
      gap: cross-entropy of the data minus the base's, with its standard error over rows. kl: from the base.
      agreement: share of equal most likely tokens. alone: the gap of the auxiliary by itself. tokens:
        number of tokens evaluated.
    """

    gap: float
    gap_error: float
    kl: float
    agreement: float
    alone: float
    tokens: int


def evaluate(model: Predicted, params: PyTree, batches: Iterable[Batch]) -> Nearness:
    """Compare `predict.forward(own=True)` with the base on held-out batches: as served, at every position."""
    run = jax.jit(lambda params, batch: _sums(model, params, batch))
    sums = np.concatenate([np.asarray(run(params, batch), np.float64) for batch in batches])
    count, gap, kl, same, alone = sums[sums[:, 0] > 0].T
    error = np.std(gap / count, ddof=1) / math.sqrt(len(gap)) if len(gap) > 1 else math.nan
    total = count.sum()
    return Nearness(
        gap.sum() / total, float(error), kl.sum() / total, same.sum() / total, alone.sum() / total, int(total)
    )


def _sums(model: Predicted, params: PyTree, batch: Batch) -> Array:
    """[B, 5] sums of each row: predictions that count, and over them gap, KL, agreement, the auxiliary's
    gap."""
    where = (batch.tokens, batch.positions, batch.segments)
    base, auxiliary = (model.base, params["base"]), (model.auxiliary, params["auxiliary"])
    streams = (forward(*base, *where), predict.forward(model, params, *where), forward(*auxiliary, *where))

    def row(parts):
        (own, served, small), targets, mask = parts
        known, found, alone = (
            jax.nn.log_softmax(logits(*by, x), axis=-1)
            for by, x in ((base, own), (base, served), (auxiliary, small))
        )

        def loss(scores):
            return -jnp.take_along_axis(scores, targets[:, None], axis=1)[:, 0]

        gap, worse = loss(found) - loss(known), loss(alone) - loss(known)
        kl = jnp.sum(jnp.exp(known) * (known - found), axis=-1)
        same = (jnp.argmax(known, axis=-1) == jnp.argmax(found, axis=-1)).astype(jnp.float32)
        return jnp.stack([mask.sum(), *(jnp.sum(x * mask) for x in (gap, kl, same, worse))])

    return jax.lax.map(row, (streams, batch.targets, batch.mask))


def make(
    base: tuple[Transformer, PyTree],
    auxiliary: tuple[Transformer, PyTree],
    prediction: Prediction,
    start: str = "least_squares",
    batches: Iterable[Batch] = (),
    seed: int = 0,
) -> tuple[Predicted, PyTree]:
    """A `Predicted` of a base and an auxiliary, with an untrained predictor.

    start: "least_squares", fitted on `batches`, "identity" (rows of one width), or "uniform" (random).

    Raises:
      UsageError: the parts do not fit each other, or there are too few tokens to fit.
    """
    model = Predicted(base[0], auxiliary[0], prediction)
    params = {"base": base[1], "auxiliary": auxiliary[1]}
    if start == "least_squares":
        predictor = fit(model, params, batches)
    elif start == "identity":
        predictor = predict.identity(model)
    else:
        predictor = predict.uniform(model, jax.random.key(seed))
    return model, params | {"predictor": predictor}


def parser() -> Parser:
    """All flags."""
    p = Parser(
        prog="python -m swiftkv_jax.distill.pair",
        description="Make a KV prediction adapter without training.",
    )
    p.add_argument(
        "--base", required=True, metavar="DIR", help="folder or hub id of the model that generates"
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--keep", metavar="N,N,...", help="layers of the base that make the auxiliary")
    source.add_argument("--auxiliary", metavar="DIR", help="folder or hub id of a separate auxiliary model")
    p.add_argument(
        "--text", required=True, action="append", metavar="FILE", help="training text; may be repeated"
    )
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="the adapter's folder")
    p.add_argument(
        "--start", choices=STARTS, default=STARTS[0], help="initialisation of the predictor (%(default)s)"
    )
    p.add_argument(
        "--map",
        choices=MAPS,
        help="which auxiliary row predicts which row (nearest with --keep, else spread)",
    )
    p.add_argument(
        "--tail",
        type=int,
        default=1,
        metavar="N",
        help="last prompt tokens that the base processes itself (1)",
    )
    p.add_argument(
        "--tokens", type=int, default=32_768, metavar="N", help="tokens to fit the predictor on (32768)"
    )
    p.add_argument("--length", type=int, default=256, metavar="N", help="tokens per row of data (256)")
    p.add_argument(
        "--dtype", default="float32", metavar="T", help="dtype of weights and activations (float32)"
    )
    return p


def _run(args: argparse.Namespace) -> None:
    integer("--tokens", args.tokens, 1)
    home = local_folder(args.base)
    with working(show, f"reading {args.base}"):
        base = from_pretrained(home, dtype=args.dtype)
    tokenizer = load_tokenizer(home)
    keep: tuple[int, ...] = ()
    if args.keep is not None:
        try:
            keep = tuple(int(part) for part in args.keep.split(","))
        except ValueError:
            raise UsageError(f"--keep takes layers as 0,2,4, not {args.keep!r}") from None
        auxiliary = surgery.layer_pruned(*base, keep)
    else:
        check_tokenizers(home, folder := local_folder(args.auxiliary))
        with working(show, f"reading {args.auxiliary}"):
            auxiliary = from_pretrained(folder, dtype=args.dtype)
    context = min(model.config.longest_context for model, _ in (base, auxiliary))
    integer("--length", args.length, 2, context)
    given = PredictConfig(auxiliary=args.auxiliary or "", keep=keep, map=args.map, tail=args.tail)
    prediction, theirs = given.build(base[0].plan, auxiliary[0].plan), auxiliary[0].plan.num_rows
    data = DataConfig(
        sources=tuple(args.text), split="train", seq_len=args.length, batch_size=8, long_documents="fill"
    )
    held_out = dataclasses.replace(data, split="held_out")
    with working(show, f"reading {', '.join(args.text)}"):
        batches_held_out = evaluation_batches(held_out, tokenizer, _HELD_OUT) if args.tail == 1 else []
        loader = DataLoader(data, tokenizer)
    try:
        count = math.ceil(args.tokens / (data.batch_size * data.seq_len))
        with working(show, f"fitting on {count} batches") as doing:
            batches = (batch for batch, _ in doing.counted(itertools.islice(loader, count), count))
            model, params = make(base, auxiliary, prediction, args.start, batches)
    finally:
        loader.close()
    save_adapter(args.out, model, params, base=home)
    print(f"saved {args.out}: rows {prediction.reads} of {theirs} auxiliary rows, tail {args.tail}")
    if batches_held_out:
        with working(show, "evaluating") as doing:
            near = evaluate(model, params, doing.counted(batches_held_out))
        print(
            f"first tokens of {near.tokens} prompts: {near.gap:.4f} +- {near.gap_error:.4f} nats above the "
            f"base, KL {near.kl:.4f}, agreement {near.agreement:.3f} (the auxiliary alone: {near.alone:.3f})"
        )


def main(argv: list[str] | None = None) -> int:
    """The command line; its exit code."""
    return exit_code(lambda: _run(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
