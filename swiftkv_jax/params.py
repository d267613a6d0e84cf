"""Every weight described once: shape, axis letters and initialiser, as a tree that mirrors the parameters."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from swiftkv_jax import sharding
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.errors import UsageError
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.shapes import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter array: its shape, its axis letters (see shapes.py), its initial standard deviation.

    `std` 0 means ones for a gain and zeros for a bias, told apart by `fill`.
    """

    shape: tuple[int, ...]
    axes: str
    std: float = 0.0
    fill: float = 0.0

    def init(self, key: Array, dtype=jnp.float32) -> Array:
        if not self.std:
            return jnp.full(self.shape, self.fill, dtype)
        return (self.std * jax.random.normal(key, self.shape)).astype(dtype)


def _linear(n: int, i: tuple[str, int], o: tuple[str, int], bias: bool, std: float) -> PyTree:
    out = {"kernel": Weight((n, i[1], o[1]), f"L {i[0]} {o[0]}", std)}
    return out | ({"bias": Weight((n, o[1]), f"L {o[0]}")} if bias else {})


def layers(config: ModelConfig, n: int) -> PyTree:
    """`n` equal layers, stacked, without the projections that make rows."""
    width, ffn = ("D", config.hidden_size), ("F", config.intermediate_size)
    heads = ("N", config.num_heads * config.head_dim)
    out_std = 0.02 / (2 * config.num_layers) ** 0.5  # residual branches start small (GPT-2)
    gain = Weight((n, width[1]), "L .", fill=1.0)
    tree = {
        "input_norm": gain,
        "q_proj": _linear(n, width, heads, config.qkv_bias, 0.02),
        "o_proj": _linear(n, heads, width, config.o_bias, out_std),
        "post_norm": gain,
        "gate_proj": _linear(n, width, ffn, config.mlp_bias, 0.02),
        "up_proj": _linear(n, width, ffn, config.mlp_bias, 0.02),
        "down_proj": _linear(n, ffn, width, config.mlp_bias, out_std),
    }
    return tree | ({"q_norm": Weight((n, config.head_dim), "L .", fill=1.0)} if config.qk_norm else {})


def makers(config: ModelConfig, n: int) -> PyTree:
    """The k and v projections of `n` rows, stacked."""
    width, row = ("D", config.hidden_size), ("E", config.kv_width)
    tree = {
        "k_proj": _linear(n, width, row, config.qkv_bias, 0.02),
        "v_proj": _linear(n, width, row, config.qkv_bias, 0.02),
    }
    return tree | ({"k_norm": Weight((n, config.head_dim), "L .", fill=1.0)} if config.qk_norm else {})


def _fill(config: ModelConfig, plan: KVPlan) -> PyTree:
    """The makers of the upper rows: kernels [D, rows, E], so that one matmul with no copy fills them all."""
    tree = makers(config, len(plan.upper_makers))
    for name in ("k_proj", "v_proj"):
        n, width, row = tree[name]["kernel"].shape
        tree[name]["kernel"] = Weight((width, n, row), "D L E", 0.02)
    return tree | ({"norm_swiftkv": Weight((config.hidden_size,), ".", fill=1.0)} if plan.is_swiftkv else {})


def weights(config: ModelConfig, plan: KVPlan) -> PyTree:
    """The tree of `Weight`s of one model.

    lower, upper: the layers before and after `plan.depth`; lower_rows: the makers inside lower;
    fill: the makers whose rows come from the stream leaving lower, and their shared norm (SwiftKV only);
    exit: the exit head's norm and kernel, on that same stream.

    Raises:
      UsageError: an exit head in a plan that has no split for it to stand at.
    """
    if config.exit_head and not plan.is_swiftkv:
        raise UsageError(
            "an exit head reads the stream entering a SwiftKV plan's split; this plan has none: "
            "use KVPlan.swiftkv, or exit_head=False"
        )
    vocab, width = ("V", config.vocab_size), ("D", config.hidden_size)
    tree = {
        "embed": Weight((vocab[1], width[1]), "V D", 0.02),
        "lower": layers(config, plan.depth),
        "lower_rows": makers(config, len(plan.lower_makers)),
        "fill": _fill(config, plan),
        "upper": layers(config, config.num_layers - plan.depth),
        "norm": Weight((config.hidden_size,), ".", fill=1.0),
    }
    head = {"lm_head": Weight((width[1], vocab[1]), "D V", 0.02)}
    if config.exit_head:
        tree["exit"] = head | {"norm": tree["norm"]}
    return tree if config.tie_word_embeddings else tree | head


def init(config: ModelConfig, plan: KVPlan, key: Array, dtype=jnp.float32) -> PyTree:
    """Random parameters; each weight's key depends on its place in the tree only."""
    leaves, tree = jax.tree.flatten(weights(config, plan))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [w.init(k, dtype) for w, k in zip(leaves, keys, strict=True)])


def abstract(config: ModelConfig, plan: KVPlan, dtype, mesh: Mesh | None = None) -> PyTree:
    """Shapes, dtypes and (with a mesh) shardings of the parameters, without their values."""

    def one(w: Weight) -> jax.ShapeDtypeStruct:
        place = sharding.named(mesh, w.axes, w.shape) if mesh is not None else None
        return jax.ShapeDtypeStruct(w.shape, dtype, sharding=place)

    return jax.tree.map(one, weights(config, plan))


def count(tree: PyTree) -> int:
    """Number of parameters in a tree of arrays or `Weight`s."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def layer(stack: PyTree, index: int) -> PyTree:
    """Layer `index` of a stacked tree, or of the list that `unstack` makes."""
    return stack[index] if isinstance(stack, list) else jax.tree.map(lambda leaf: leaf[index], stack)


def unstack(params: PyTree) -> PyTree:
    """Stacks as lists of per-layer trees: sliced once, outside the decode loop, not once a token.

    Each MLP's gate and up projections become one, [D, 2, F]: a few rows of a product leave a machine idle.
    """

    def split(stack: PyTree) -> list[PyTree]:
        depth = jax.tree.leaves(stack)[0].shape[0]
        return [_one_gate_up(jax.tree.map(lambda leaf, j=j: leaf[j], stack)) for j in range(depth)]

    return params | {name: split(params[name]) for name in ("lower", "lower_rows", "upper")}


def _one_gate_up(tree: PyTree) -> PyTree:
    """A layer's tree with `gate_up_proj` in place of two; one without them (makers) as it is."""
    if "gate_proj" not in tree:
        return tree
    left = {name: leaf for name, leaf in tree.items() if name not in ("gate_proj", "up_proj")}
    pair = tree["gate_proj"], tree["up_proj"]
    return left | {"gate_up_proj": jax.tree.map(lambda gate, up: jnp.stack([gate, up], axis=-2), *pair)}
