"""What a model and a plan cost: FLOPs per token, cache bytes per token, and the peaks of known chips.

A matmul of [m, k] by [k, n] counts 2 m k n. Norms, rotary angles, softmax, biases and activations are not
counted. Causal attention counts the keys a query sees on average, not the masked half.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

from swiftkv_jax.cache import EIGHT_BIT
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.errors import UsageError
from swiftkv_jax.plan import KVPlan

# By `jax.devices()[0].device_kind`, per device, from the vendors' data sheets.
# Dense bfloat16 FLOP/s:
PEAK_FLOPS: dict[str, float] = {
    "TPU v4": 275e12,
    "TPU v5": 459e12,  # v5p
    "TPU v5 lite": 197e12,  # v5e
    "TPU v6 lite": 918e12,  # v6e
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}
# Bytes of device memory:
HBM_BYTES: dict[str, float] = {
    "TPU v4": 32 * 2**30,
    "TPU v5": 95 * 2**30,
    "TPU v5 lite": 16 * 2**30,
    "TPU v6 lite": 32 * 2**30,
    "NVIDIA H100 80GB HBM3": 84_942_979_072,
    "NVIDIA H200": 150e9,
    "NVIDIA A100-SXM4-80GB": 80 * 2**30,
    "NVIDIA A100-SXM4-40GB": 40 * 2**30,
}
# Bytes per second between device memory and the chip:
HBM_BANDWIDTH: dict[str, float] = {
    "TPU v4": 1.228e12,
    "TPU v5": 2.765e12,
    "TPU v5 lite": 0.819e12,
    "TPU v6 lite": 1.640e12,
    "NVIDIA H100 80GB HBM3": 3.352e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA A100-SXM4-40GB": 1.555e12,
}


def flops_table(
    config: ModelConfig, plan: KVPlan | None = None, context: int = 131072, *, layers: int | None = None
) -> dict[str, float]:
    """GFLOP (10^9) per prompt token, averaged over a prompt of `context` tokens: SwiftKV paper, Table 1.

    Keys: `vocab` (embedding and output head), `kv`, `qo`, `mlp`, `attention`, and their `total`.

    The paper's accounting: every maker's k and v run for every prompt token, everything else in the layers
    below `plan.split` only, so a standard model runs all its layers, as other systems do. The one token whose
    upper layers do run is not counted. The embedding counts as a matmul, and the head for every token.
    `layers` counts another number of layers that every token runs; what `model.step` runs is `plan.depth`.

    Against the paper's printed numbers for Llama-3.1-70B: it counts a vocabulary of 131072 (4.3 GFLOP; the
    checkpoint's 128256 give 4.2) and prints attention, and so totals, in units of 2^30 (160; here 171.8).
    Totals relative to the baseline, its point, differ from its 75.5, 51.0 and 50.7 % by 0.1 points or less:
    it divides rounded totals.

    Raises:
      UsageError: the plan has another number of layers, or context is not positive.
    """
    plan = _checked(config, plan)
    if context < 1:
        raise UsageError(f"context must be at least 1 token, not {context}")
    depth = plan.split if layers is None else layers
    one = _layer(config)
    table = {
        "vocab": 2 * _head(config),
        "kv": len(plan.makers) * one["kv"],
        "qo": depth * (one["q"] + one["o"]),
        "mlp": depth * one["mlp"],
        "attention": _attention(config, context, 0, depth),
    }
    table = {name: value / 1e9 for name, value in table.items()}
    return table | {"total": sum(table.values())}


def cache_bytes_per_token(
    config: ModelConfig, plan: KVPlan | None = None, dtype: DTypeLike = "bfloat16"
) -> int:
    """Bytes that one token takes in a cache of `dtype`: keys and values of every row, and their scales."""
    plan = _checked(config, plan)
    scales = 4 * config.num_kv_heads if jnp.dtype(dtype).name in EIGHT_BIT else 0
    return plan.num_rows * 2 * (config.kv_width * jnp.dtype(dtype).itemsize + scales)


def cache_reduction(plan: KVPlan) -> float:
    """The share of a standard model's cache that `plan` saves: SwiftKV paper, Table 2."""
    return 1 - plan.num_rows / plan.num_layers


def training_flops_per_token(
    config: ModelConfig, plan: KVPlan, seq_len: int, shared_lower: bool, trainable: str = "swiftkv"
) -> float:
    """FLOPs of one distillation step, per token of sequences of `seq_len` tokens, as MFU wants them.

    Counted: the lower layers forward, once when teacher and student share them, else twice; the teacher's
    upper layers forward; the student's `fill` and upper layers forward, their activation gradients (as much
    again; twice for attention), and the weight gradients of what trains (k, v and q; with trainable="upper"
    also o and the MLP); two output heads forward and one activation gradient; an exit head forward and its
    weight gradient. Recomputation (remat) is not counted, nor is the mask between packed documents.
    """
    plan = _checked(config, plan)
    one, head = _layer(config), _head(config)
    top = config.num_layers - plan.depth
    dense = one["q"] + one["o"] + one["mlp"]
    low = plan.depth * dense + len(plan.lower_makers) * one["kv"] + _attention(config, seq_len, 0, plan.depth)
    attention = _attention(config, seq_len, plan.depth, config.num_layers)
    teacher = top * (dense + one["kv"]) + attention + head
    made = len(plan.upper_makers) * one["kv"]
    forward = top * dense + made + attention + head
    backward = top * dense + made + 2 * attention + head
    trained = made + top * (dense if trainable == "upper" else one["q"]) + 2 * head * config.exit_head
    return (1 if shared_lower else 2) * low + teacher + forward + backward + trained


def full_training_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of one step that trains every weight, per token: forward once, backward twice that."""
    return 3 * (
        config.num_layers * sum(_layer(config).values())
        + _attention(config, seq_len, 0, config.num_layers)
        + _head(config)
    )


def _checked(config: ModelConfig, plan: KVPlan | None) -> KVPlan:
    plan = KVPlan.standard(config.num_layers) if plan is None else plan
    if plan.num_layers != config.num_layers:
        raise UsageError(f"the plan has {plan.num_layers} layers, the model {config.num_layers}")
    return plan


def _head(config: ModelConfig) -> float:
    """FLOPs of one token's output head."""
    return 2.0 * config.hidden_size * config.vocab_size


def _layer(config: ModelConfig) -> dict[str, float]:
    """FLOPs of one token in each projection of one layer; `kv` is one maker's k and v."""
    heads = 2.0 * config.hidden_size * config.num_heads * config.head_dim
    return {
        "kv": 2 * 2.0 * config.hidden_size * config.kv_width,
        "q": heads,
        "o": heads,
        "mlp": 3 * 2.0 * config.hidden_size * config.intermediate_size,
    }


def _attention(config: ModelConfig, context: int, first: int, last: int) -> float:
    """FLOPs of one token's scores and mixing in layers [first, last), averaged over its positions."""
    keys = 0.0
    for window in config.windows[first:last]:
        w = min(window, context)
        keys += (w * (w + 1) / 2 + (context - w) * w) / context
    return 2 * 2.0 * config.num_heads * config.head_dim * keys
