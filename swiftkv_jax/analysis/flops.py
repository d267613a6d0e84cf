"""The costs of a model under a plan: FLOPs per token, cache bytes per token; and the peaks of known chips.

A matmul of [m, k] by [k, n] counts 2 m k n. Norms, rotary angles, softmax, biases and activations are not
counted. Causal attention counts the keys a query sees on average, not the masked half.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.experts import EXPERTS
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import SELF, KVPlan, Prediction
from swiftkv_jax.core.cache import EIGHT_BIT
from swiftkv_jax.core.layers import query_weights
from swiftkv_jax.core.rows import FORMS
from swiftkv_jax.core.shapes import PyTree


class Chip(NamedTuple):
    """One device, by its vendor's data sheet: dense bfloat16 FLOP/s, bytes of memory, and bytes per second
    between that and the chip."""

    flops: float
    memory: float
    bandwidth: float


CHIPS = {  # by `jax.devices()[0].device_kind`
    "TPU v4": Chip(275e12, 32 * 2**30, 1.228e12),
    "TPU v5": Chip(459e12, 95 * 2**30, 2.765e12),  # v5p
    "TPU v5 lite": Chip(197e12, 16 * 2**30, 0.819e12),  # v5e
    "TPU v6 lite": Chip(918e12, 32 * 2**30, 1.640e12),  # v6e
    "NVIDIA H100 80GB HBM3": Chip(989e12, 84_942_979_072, 3.352e12),
    "NVIDIA H200": Chip(989e12, 150e9, 4.8e12),
    "NVIDIA A100-SXM4-80GB": Chip(312e12, 80 * 2**30, 2.039e12),
    "NVIDIA A100-SXM4-40GB": Chip(312e12, 40 * 2**30, 1.555e12),
    "NVIDIA L4": Chip(121e12, 24e9, 0.3e12),
    "NVIDIA B200": Chip(2250e12, 180e9, 8e12),
    "Tesla T4": Chip(65e12, 16e9, 0.32e12),  # in float16: its matrix units do not multiply bfloat16
}


_INSIDE = {True: 2 / 3, False: 1 / 2}  # the share of an MLP, gated or not, before its last product


def flops_table(
    config: ModelConfig, plan: KVPlan | None = None, context: int = 131072, *, layers: int | None = None
) -> dict[str, float]:
    """GFLOP (10^9) per prompt token, averaged over a prompt of `context` tokens: SwiftKV paper, Table 1.

    Keys: `vocab` (embedding and output head), `kv`, `qo`, `mlp`, `attention`, and their `total`.

    This is the paper's accounting: every maker's k and v run for every prompt token, everything else in the
    layers below `plan.split` only, so a standard model runs all its layers, as other systems do. The one
    token that does run the upper layers is not counted. The embedding counts as a matmul, and the head for
    every token. `layers` overrides the number of layers that every token runs; `loop.step` runs
    `plan.depth`. For rows of other forms, `kv` counts the projections that turn them into keys and values
    (W_KV), once for each token, as is possible in a prompt (Slim attention paper, figure 3a);
    `analysis.slim_tables` counts decoding.

    Differences to the paper's printed numbers for Llama-3.1-70B: the paper counts a vocabulary of 131072
    (4.3 GFLOP; the checkpoint's 128256 give 4.2) and prints attention, and so totals, in units of 2^30 (160;
    here 171.8). Totals relative to the baseline differ from its 75.5, 51.0 and 50.7 % by 0.1 points or less,
    because it divides rounded totals.

    Raises:
      UsageError: the plan has another number of layers, or context is not positive.
    """
    plan = _checked(config, plan)
    if context < 1:
        raise UsageError(f"context must be at least 1 token, not {context}")
    depth = plan.split if layers is None else layers
    low = _layers(config, 0, depth)
    table = {
        "vocab": 2 * _head(config),
        "kv": _made(config, plan, range(len(plan.rows))),
        "qo": low["q"] + low["o"],
        "mlp": low["mlp"],
        "attention": _attention(config, context, 0, depth),
    }
    table = {name: value / 1e9 for name, value in table.items()}
    return table | {"total": sum(table.values())}


def prompt_gflop(config: ModelConfig, plan: KVPlan | None, context: int) -> float:
    """GFLOP per prompt token in the layers: `flops_table` without the vocabulary."""
    table = flops_table(config, plan, context)
    return table["total"] - table["vocab"]


def cache_bytes_per_token(
    config: ModelConfig, plan: KVPlan | None = None, dtype: DTypeLike = "bfloat16", space: str = SELF
) -> int:
    """Bytes that one token takes in a cache of `dtype`: its numbers in every row, and their scales.

    With space=ENCODER, the bytes that one position of a source takes.
    """
    plan = _checked(config, plan)
    size, scale = jnp.dtype(dtype).itemsize, 4 if jnp.dtype(dtype).name in EIGHT_BIT else 0

    def row(form: str) -> int:
        return sum(a.heads * (a.width * size + scale) for a in FORMS[form].arrays(config))

    return sum(plan.stored(form, space) * row(form) for form in plan.forms_of(space))


def training_flops_per_token(
    config: ModelConfig, plan: KVPlan, seq_len: int, shared_lower: bool, trainable: str = "swiftkv"
) -> float:
    """FLOPs of one distillation step, per token of sequences of `seq_len` tokens, as MFU counts them.

    Counted: the lower layers forward, once when teacher and student share them, else twice; the teacher's
    upper layers forward; the student's `fill` and upper layers forward (with a tail also their own rows),
    their activation gradients (as much again; twice for attention), and the weight gradients of what trains
    (k, v and without a tail q; with trainable="upper" also o and the MLP); two output heads forward and one
    activation gradient; an exit head forward and its weight gradient. Recomputation (remat) is not counted,
    nor is the mask between packed documents.
    """
    plan = _checked(config, plan)
    head, top = _head(config), _layers(config, plan.depth, config.num_layers)
    dense = _dense(top)
    low = _dense(_layers(config, 0, plan.depth)) + _attention(config, seq_len, 0, plan.depth)
    low += _made(config, plan, [i for i, row in enumerate(plan.rows) if row.source != plan.depth])
    attention = _attention(config, seq_len, plan.depth, config.num_layers)
    teacher = dense + top["kv"] + attention + head
    made = _made(config, plan, plan.made_at(plan.depth))
    rows = made + (top["kv"] if plan.tail else 0)
    forward = dense + rows + attention + head
    backward = dense + rows + 2 * attention + head
    queries = 0 if plan.tail else top["q"]
    trained = made + (dense if trainable == "upper" else queries) + 2 * head * config.exit_head
    return (1 if shared_lower else 2) * low + teacher + forward + backward + trained


def recomputed_flops_per_token(
    config: ModelConfig, plan: KVPlan, seq_len: int, trainable: str = "swiftkv"
) -> float:
    """FLOPs per token that remat adds to one step: a second forward pass of the layers that a gradient
    passes.

    The last product of each layer is left out, since no gradient needs it. The layers are the student's upper
    ones, whose rows are kept but for those of a tail, or with trainable="all" every layer and its row.
    """
    plan = _checked(config, plan)
    first = 0 if trainable == "all" else plan.depth
    layers = _layers(config, first, config.num_layers)
    own = trainable == "all" or plan.tail
    dense = _dense(layers, _INSIDE[config.gated]) + (layers["kv"] if own else 0)
    return dense + _attention(config, seq_len, first, config.num_layers)


def full_training_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of one step that trains every weight, per token: forward once, backward twice that."""
    return 3 * (
        sum(_layers(config, 0, config.num_layers).values())
        + _attention(config, seq_len, 0, config.num_layers)
        + _head(config)
    )


Part = tuple[ModelConfig, KVPlan]


def prediction_training_flops_per_token(
    base: Part, auxiliary: Part, prediction: Prediction, seq_len: int, kl: bool, alone: bool
) -> float:
    """FLOPs of one step that trains an auxiliary and a predictor, per token.

    Counted: the base's own rows forward, and with `kl` its last layers and output head; the auxiliary up to
    the deepest row that is read, or with `alone` (its own loss) whole with its head, and the predictor,
    forward and twice that backward; the base on predicted rows and its head, forward and their activation
    gradients (as much again; twice for attention). The base's weights have no gradients.
    """
    (config, plan), (small, small_plan) = base, auxiliary
    own = _pass(config, plan, plan.num_layers if kl else plan.depth, seq_len)
    own += _head(config) if kl else 0
    depth = small_plan.num_layers if alone else small_plan.deepest(prediction.reads)
    read = _pass(small, small_plan, depth, seq_len)
    read += _head(small) if alone else 0
    pairs = zip(prediction.reads, plan.rows, strict=True)
    widths = [(small.at(small_plan.rows[read].maker), config.at(row.maker)) for read, row in pairs]
    maps = 2 * 2.0 * sum(inside.kv_width * outside.kv_width for inside, outside in widths)
    dense = _dense(_layers(config, 0, config.num_layers)) + _head(config)
    return own + 3 * (read + maps + _attention(config, seq_len, 0, config.num_layers)) + 2 * dense


def prediction_recomputed_flops_per_token(
    base: Part, auxiliary: Part, prediction: Prediction, seq_len: int, alone: bool
) -> float:
    """FLOPs per token that remat adds to such a step: a second forward pass, without the last product, of the
    auxiliary's layers and of the base's over predicted rows."""
    small, plan = auxiliary
    depth, total = plan.num_layers if alone else plan.deepest(prediction.reads), 0.0
    for (config, _), layers in ((base, base[0].num_layers), (auxiliary, depth)):
        total += _dense(_layers(config, 0, layers), _INSIDE[config.gated])
        total += _attention(config, seq_len, 0, layers)
    own = [i for i, row in enumerate(plan.rows) if row.maker < depth and plan.makes_own(row.maker)]
    return total + float(_made(small, plan, own)) if own else total


def _pass(config: ModelConfig, plan: KVPlan, layers: int, seq_len: int) -> float:
    """FLOPs of one token that runs `layers` layers and makes every row up to the input of the next."""
    rows = [i for i, row in enumerate(plan.rows) if isinstance(row.source, int) and row.source <= layers]
    dense = _dense(_layers(config, 0, layers))
    return dense + _made(config, plan, rows) + _attention(config, seq_len, 0, layers)


def _checked(config: ModelConfig, plan: KVPlan | None) -> KVPlan:
    plan = config.plan() if plan is None else plan
    if plan.num_layers != config.num_layers:
        raise UsageError(f"the plan has {plan.num_layers} layers, the model {config.num_layers}")
    return plan


def _head(config: ModelConfig) -> float:
    """FLOPs of one token's output head."""
    return 2.0 * config.hidden_size * config.vocab_size


def _layers(config: ModelConfig, first: int, last: int) -> dict[str, float]:
    """FLOPs of one token in each projection of layers [first, last); `kv`: as if each made a row."""
    kinds = config.kinds[first:last]
    sizes, linear = [kind.sizes for kind in kinds], 2.0 * config.hidden_size**2
    per_head = 2.0 * config.hidden_size * config.head_dim
    heads = per_head * sum(each.num_heads for each in sizes)
    queries, made = heads, 2 * per_head * sum(each.num_kv_heads for each in sizes)
    if config.latent:
        row = FORMS[config.form].weights(config)
        queries, made = (_products(tree) * len(kinds) for tree in (query_weights(config), row))
    ffn, router = 0, 0  # of an expert layer, what one token runs
    for kind in kinds:
        if kind.mlp == EXPERTS and (experts := config.experts):
            ffn += experts.per_token * experts.width + experts.shared
            router += experts.count + experts.shared_gate
        else:
            ffn += kind.sizes.intermediate_size
    return {
        "kv": made,
        "q": queries,
        "o": heads * config.value_dim / config.head_dim
        + linear * sum(kind.attention == "linear" for kind in kinds),
        "mlp": 2.0 * config.hidden_size * ((2 + config.gated) * ffn + router)
        + linear * sum(kind.mlp == "linear" for kind in kinds),
    }


def _dense(layers: dict[str, float], share: float = 1.0) -> float:
    """All but the rows of some layers, with a share of their MLPs."""
    return layers["q"] + layers["o"] + layers["mlp"] * share


def _made(config: ModelConfig, plan: KVPlan, rows: Iterable[int]) -> float:
    """FLOPs of one token in the projections that make some rows and turn them into keys and values, once
    each."""
    makers = [(FORMS[plan.rows[row].form], config.at(plan.rows[row].maker)) for row in rows]
    every = [(form, form.weights(shape) | form.reader_weights(shape)) for form, shape in makers]
    used = ({name: p for name, p in tree.items() if name not in form.kept} for form, tree in every)
    return sum(map(_products, used))


def _products(tree: PyTree) -> float:
    """FLOPs of one token in the projections of a tree of `Weight`s."""
    return sum(2.0 * math.prod(p["kernel"].shape) for p in tree.values() if isinstance(p, dict))


def _attention(config: ModelConfig, context: int, first: int, last: int) -> float:
    """FLOPs of one token's scores and mixing in layers [first, last), averaged over its positions."""
    keys = 0.0
    for kind in config.kinds[first:last]:
        w = min(kind.window, context)
        keys += kind.sizes.num_heads * (w * (w + 1) / 2 + (context - w) * w) / context
    return 2.0 * (config.head_dim + config.value_dim) * keys
