"""Savings of KV prediction: the FLOPs figures of its paper (arXiv 2410.08391), and the FLOPs as run here.

The paper divides the base's parameters by the auxiliary's (section 4.4), embeddings included and counted
once; the predictor and the one token that the base reads are left out. `prediction_table` counts them, and
attention too.

    python -m benchmarks.papers.prediction_flops
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from swiftkv_jax.common.checks import above, integer, number
from swiftkv_jax.common.errors import Parser, UsageError, exit_code
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan, Prediction, ascending
from swiftkv_jax.core import weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """A standard model by the sizes of each of its layers, which may differ.

    Attributes:
      heads, kv_heads, ffn: of each layer. extra: parameters beside the layers' matrices, embeddings once.
      matrices: of each MLP.
    """

    width: int
    head_dim: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    ffn: tuple[int, ...]
    extra: int
    matrices: int = 3

    @classmethod
    def of(cls, config: ModelConfig) -> "Sizes":
        """The sizes of a model."""
        heads, kv_heads, ffn = zip(*(kind.sizes for kind in config.kinds), strict=True)
        sizes = {"heads": heads, "kv_heads": kv_heads, "ffn": ffn, "matrices": 2 + config.gated, "extra": 0}
        alone = cls(width=config.hidden_size, head_dim=config.head_dim, **sizes)
        every = weights.count(weights.weights(config, KVPlan.standard(config.num_layers)))
        return dataclasses.replace(alone, extra=every - alone.parameters)

    def kept(self, layers: Sequence[int]) -> "Sizes":
        """The sizes with only these layers: a layer-pruned model."""
        layers = ascending("layers", layers, self.layers)
        parts = {name: tuple(getattr(self, name)[i] for i in layers) for name in ("heads", "kv_heads", "ffn")}
        return dataclasses.replace(self, **parts)

    @property
    def layers(self) -> int:
        return len(self.heads)

    @property
    def parameters(self) -> int:
        return self.extra + sum(self.made(i) + self.dense(i) for i in range(self.layers))

    def row(self, layer: int) -> int:
        """Numbers of one token's keys, or values."""
        return self.kv_heads[layer] * self.head_dim

    def made(self, layer: int) -> int:
        """Parameters of a layer's k and v."""
        return 2 * self.width * self.row(layer)

    def dense(self, layer: int) -> int:
        """Parameters of a layer's other matrices."""
        return self.width * (2 * self.heads[layer] * self.head_dim + self.matrices * self.ffn[layer])

    def alone(self, layer: int, keys: float) -> float:
        """FLOPs of one token in one layer that makes its own row, where it sees `keys` keys."""
        return 2.0 * (self.made(layer) + self.dense(layer)) + 4.0 * keys * self.head_dim * self.heads[layer]

    def read(self, depth: int, rows: int, keys: float) -> float:
        """FLOPs of one token that runs `depth` layers, makes `rows` rows and sees `keys` keys a layer."""
        dense = sum(map(self.dense, range(depth))) + sum(map(self.made, range(rows)))
        return 2.0 * dense + 4.0 * keys * self.head_dim * sum(self.heads[:depth])


_ARCHITECTURES = Path(__file__).parents[2] / "configs" / "architectures"
OPENELM = {
    name: Sizes.of(ModelConfig.from_hf(_ARCHITECTURES / f"openelm_{name.lower().replace('.', '_')}.json"))
    for name in ("270M", "450M", "1.1B", "3B")
}

# "FLOPs reduction" of Tables 3 and 5 to 8; Table 3 prints 3.59 for 1.1B's 0.25.
_PAIRS = {
    "1.1B": {"C-450M": 2.36, "C-270M": 3.98, "LP-0.75": 1.34, "LP-0.5": 1.93, "LP-0.25": 3.60},
    "3B": {"C-1.1B": 2.81, "C-450M": 6.64, "C-270M": 11.18, "LP-0.75": 1.34, "LP-0.5": 1.97, "LP-0.25": 3.84},
}
PRINTED = {f"{base}-KVP-{name}": value for base, row in _PAIRS.items() for name, value in row.items()}
# Of either base; LazyLLM's as in Table 7: Tables 5 and 6 swap those of 0.75-0.1 and 0.75-0.01.
_BASELINES = {"RP-0.75": 1.33, "RP-0.5": 2.00, "RP-0.25": 4.00, "SP-0.5": 1.33, "SP-0.25": 2.00}
_BASELINES |= {"L0.75-0.75": 1.21, "L0.75-0.5": 1.38, "L0.75-0.25": 1.60, "L0.75-0.1": 1.77}
_BASELINES |= {"L0.75-0.05": 1.83, "L0.75-0.01": 1.89, "L0.5-0.5": 1.54, "L0.5-0.25": 1.82}
_BASELINES |= {"L0.5-0.1": 2.04, "L0.5-0.05": 2.13, "L0.5-0.01": 2.20}
PRINTED |= {f"{base}-{name}": value for base in ("1.1B", "3B") for name, value in _BASELINES.items()}


def pruned(base: Sizes, share: float) -> tuple[Sizes, tuple[int, ...]]:
    """The paper's layer-pruned model that keeps 0.75, 0.50 or 0.25 of the layers, and which (Table 4).

    Raises:
      UsageError: it has no other.
    """
    stays = {0.75: lambda i: i % 4 != 3, 0.5: lambda i: i % 2 == 0, 0.25: lambda i: i % 4 == 0}
    if share not in stays:
        raise UsageError(f"the paper prunes to 0.75, 0.5 or 0.25 of the layers, not {share}")
    keep = tuple(i for i in range(base.layers) if stays[share](i))
    return base.kept(keep), keep


def published(base: Sizes, auxiliary: Sizes) -> float:
    """The paper's "FLOPs reduction": parameters of the base over those of the auxiliary."""
    return base.parameters / auxiliary.parameters


def prediction_table(base: Sizes, auxiliary: Sizes, prediction: Prediction, context: int) -> dict[str, float]:
    """GFLOP (10^9) per prompt token, averaged over a prompt of `context` tokens.

    Both models are standard ones, in which each layer makes and reads its own row: `Sizes` knows no plan. A
    SwiftKV or AcrossKV model makes its rows with fewer layers than are counted here.

    Keys: `auxiliary` (its layers below the deepest row that is read, and the rows up to it), `predictor`,
    `base` (the tail, which runs all layers), their `total`; beside them `full_depth`, the base reading the
    prompt through every layer, and `step`, the base as `loop.step` runs it, where only the last token runs
    the last layer. Embeddings and output heads are not counted: one token needs them.

    Raises:
      UsageError: the prediction does not fit the models, or the context is not longer than its tail.
    """
    if len(prediction.reads) != base.layers or max(prediction.reads) >= auxiliary.layers:
        raise UsageError(
            f"reads {prediction.reads} do not map {auxiliary.layers} rows to {base.layers}: give one for each"
        )
    tail, mean = prediction.tail, (context + 1) / 2
    integer("context", context, tail + 1)
    deepest = max(prediction.reads)
    maps = sum(4.0 * auxiliary.row(read) * base.row(row) for row, read in enumerate(prediction.reads))
    ahead = context - tail
    table = {
        "auxiliary": auxiliary.read(deepest, deepest + 1, (ahead + 1) / 2) * ahead / context,
        "predictor": maps * ahead / context,
        "base": base.read(base.layers, base.layers, context - (tail - 1) / 2) * tail / context,
    }
    depths = base.layers, base.layers - 1
    whole, but_one = (base.read(depth, base.layers, float(context)) for depth in depths)
    step = base.read(base.layers - 1, base.layers, mean) + (whole - but_one) / context
    full = base.read(base.layers, base.layers, mean)
    table |= {"total": sum(table.values()), "full_depth": full, "step": step}
    return {name: value / 1e9 for name, value in table.items()}


def random_pruning(keep: float) -> float:
    """FLOPs reduction of a model that reads a `keep` share of the tokens (the paper's RP)."""
    return 1 / above("keep", keep, 0, 1)


def static_pruning(keep: float, probe: float = 0.25) -> float:
    """The same when a `probe` share of the layers first reads all tokens, to choose (the paper's SP)."""
    return 1 / (number("probe", probe, 0, 1) + above("keep", keep, 0, 1))


def pruning_as_run(base: Sizes, keep: float, context: int, probe: int = 0) -> float:
    """FLOPs reduction of RP, or of SP with a probe of `probe` layers, for a prompt of `context` tokens. Token
    counts are whole numbers, attention is counted, and each layer has its own size."""

    def cost(depth: int, tokens: int) -> float:
        return base.read(depth, depth, (tokens + 1) / 2) * tokens

    left = math.ceil(above("keep", keep, 0, 1) * integer("context", context, 1))
    every = cost(base.layers, context)
    return every / (cost(base.layers, left) + cost(integer("probe", probe, 0, base.layers), context))


def lazy_llm(start: float, end: float, layers: Sequence[int | float] = ()) -> float:
    """FLOPs reduction of LazyLLM as the paper runs it: all tokens below 0.3 of the depth, then from a `start`
    share of them linearly to an `end` share at 0.9 and above.

    layers: the cost of each layer, for models whose layers differ. By default all are equal, in the limit of
    many layers, which is how the published figures were made.

    Raises:
      UsageError: a share outside (0, 1], or end above start.
    """
    above("end", end, 0, above("start", start, 0, 1))
    if not layers:
        return 1 / (0.3 + 0.6 * (start + end) / 2 + 0.1 * end)
    read = sum(cost * lazy_share(start, end, i / len(layers)) for i, cost in enumerate(layers))
    return sum(layers) / read


def lazy_as_run(base: Sizes, start: float, end: float, context: int) -> float:
    """FLOPs reduction of LazyLLM for a prompt of `context` tokens, counted as by `pruning_as_run`. A token of
    a layer sees those that are left there; choosing them is not counted."""
    above("end", end, 0, above("start", start, 0, 1))
    shares = [lazy_share(start, end, i / base.layers) for i in range(base.layers)]

    def cost(shares: Sequence[float]) -> float:
        left = [math.ceil(share * context) for share in shares]
        return sum(base.alone(i, (tokens + 1) / 2) * tokens for i, tokens in enumerate(left))

    return cost([1.0] * base.layers) / cost(shares)


def lazy_share(start: float, end: float, depth: float) -> float:
    """The share of the tokens that LazyLLM runs at a depth in [0, 1), see `lazy_llm`."""
    return 1.0 if depth < 0.3 else start + (end - start) * min(1.0, (depth - 0.3) / 0.6)


def pairs() -> list[tuple[str, Sizes, Sizes, Prediction]]:
    """The paper's KV prediction models (Table 1): name, base, auxiliary, map."""
    out = []
    for large, small in {"1.1B": ("450M", "270M"), "3B": ("1.1B", "450M", "270M")}.items():
        base = OPENELM[large]
        for name in small:
            auxiliary = OPENELM[name]
            spread = Prediction.spread(base.layers, auxiliary.layers)
            out.append((f"{large}-KVP-C-{name}", base, auxiliary, spread))
        for share in (0.75, 0.5, 0.25):
            auxiliary, keep = pruned(base, share)
            out.append((f"{large}-KVP-LP-{share}", base, auxiliary, Prediction.nearest(base.layers, keep)))
    return out


def baselines(base: Sizes) -> list[tuple[str, float, Callable[[int], float]]]:
    """The paper's RP, SP and LazyLLM (L): name, FLOPs reduction as published, and as run for a context."""
    probe = math.ceil(base.layers / 4)
    out: list[tuple[str, float, Callable[[int], float]]] = []
    for keep in (0.75, 0.5, 0.25):
        out.append((f"RP-{keep}", random_pruning(keep), partial(pruning_as_run, base, keep)))
    for keep in (0.5, 0.25):
        out.append((f"SP-{keep}", static_pruning(keep), partial(pruning_as_run, base, keep, probe=probe)))
    for start, ends in ((0.75, (0.75, 0.5, 0.25, 0.1, 0.05, 0.01)), (0.5, (0.5, 0.25, 0.1, 0.05, 0.01))):
        for end in ends:
            out.append((f"L{start}-{end}", lazy_llm(start, end), partial(lazy_as_run, base, start, end)))
    return out


def report() -> None:
    """Print the reductions: the paper's, ours by its accounting, and as run here, with prompts of 59 and of
    1024 tokens."""
    print(f"{'model':20} paper  ours   full depth: 59 / 1024 tokens  our step: 59 / 1024")

    def line(name: str, ours: float, *as_run: float) -> None:
        shown = "  ".join(f"{ratio:5.2f}" for ratio in as_run)
        print(f"{name:20} {PRINTED[name]:5.2f}  {ours:5.2f}  {shown}")

    for name, base, auxiliary, prediction in pairs():
        short, long = (prediction_table(base, auxiliary, prediction, n) for n in (59, 1024))
        ratios = [t[of] / t["total"] for of in ("full_depth", "step") for t in (short, long)]
        line(name, published(base, auxiliary), *ratios)
    for large in ("1.1B", "3B"):
        for name, ours, as_run in baselines(OPENELM[large]):
            line(f"{large}-{name}", ours, as_run(59), as_run(1024))


def main(argv: list[str] | None = None) -> int:
    """The command line; its exit code."""
    about = "FLOPs reductions of the KV prediction paper, as published and as they are run."
    p = Parser(prog="python -m benchmarks.papers.prediction_flops", description=about)
    return exit_code(lambda: report() if p.parse_args(argv) else None)


if __name__ == "__main__":
    sys.exit(main())
