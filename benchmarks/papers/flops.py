"""SwiftKV paper, Table 1, and the SwiftKV blog's Table 2: GFLOP per prompt token by operation, for any model.

    python -m benchmarks.papers.flops MODEL [--split N ...] [--share S ...] [--context T] [--printed]

`swiftkv_jax.flops_table` says what is counted, and how the paper's printed numbers differ (`--printed`).
"""

import argparse
import dataclasses
import itertools
import sys

from benchmarks.common import table
from swiftkv_jax.analysis.flops import flops_table
from swiftkv_jax.cli.plan import config_of
from swiftkv_jax.common.errors import exit_code
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan

PAPER = ("vocab", "kv", "qo", "mlp", "attention", "total")
BLOG = ("vocab", "q", "k", "v", "o", "mlp", "attention", "total")


def rows(config: ModelConfig, plans: dict[str, KVPlan], context: int, printed: bool) -> dict[str, dict]:
    """The operations of each plan, Q, K, V and O also apart, and "rel", the total relative to the first's."""
    config = dataclasses.replace(config, vocab_size=131072) if printed else config
    made = {}
    for name, plan in plans.items():
        row = flops_table(config, plan, context)
        relative = row["total"] / next(iter(made.values()))["exact"] if made else 1.0
        row |= {half: row[both] / 2 for both in ("qo", "kv") for half in both} | {"exact": row["total"]}
        if printed:
            attention = row["attention"] * 1e9 / 2**30
            row |= {"attention": attention, "total": row["total"] - row["attention"] + attention}
        made[name] = row | {"rel": 100 * relative}
    return made


def shown(made: dict[str, dict], operations: tuple[str, ...]) -> str:
    """One of the tables."""
    lines = [
        [name, *(f"{row[operation]:.3g}" for operation in operations), f"{row['rel']:.1f} %"]
        for name, row in made.items()
    ]
    return table(["", *operations, "relative"], lines)


def main(argv: list[str] | None = None) -> int:
    """Print both tables."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("model", help="a folder, a GGUF file, a config.json or a hub id")
    p.add_argument("--split", type=int, nargs="+", help="default: three quarters, and half, of the layers")
    p.add_argument("--share", type=int, nargs="+", default=[1, 4], help="layers that share a row")
    p.add_argument("--context", type=int, default=131072, help="tokens of the prompt")
    units = "in the paper's units: attention in 2^30 FLOP, and a vocabulary of 131072"
    p.add_argument("--printed", action="store_true", help=units)

    def work() -> None:
        args = p.parse_args(argv)
        config = config_of(args.model)
        layers = config.num_layers
        plans = {"baseline": KVPlan.standard(layers)}
        for split, share in itertools.product(args.split or (layers * 3 // 4, layers // 2), args.share):
            shared = f", {share}-way AcrossKV" if share > 1 else ""
            plans[f"{1 - split / layers:.0%} SwiftKV{shared}"] = KVPlan.swiftkv(layers, split, share)
        made = rows(config, plans, args.context, args.printed)
        print(shown(made, PAPER), shown(made, BLOG), sep="\n\n")

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
