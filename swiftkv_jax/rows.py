"""The forms of cache rows, how they are stored and read: one small class for each.

This is the only file in which forms differ. A form defines the arrays that store a row, the weights that make
it, how they make it, and how a query reads it: from full sequences (training), and from pages (serving).
"""

import dataclasses
import math
from functools import partial
from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import scipy.linalg

from swiftkv_jax.config import ModelConfig
from swiftkv_jax.errors import UsageError
from swiftkv_jax.kernels.common.pools import Pool, encode
from swiftkv_jax.kernels.k_cache_attention.api import k_cache_attention, x_cache_attention
from swiftkv_jax.kernels.paged_attention.api import paged_attention
from swiftkv_jax.layers import Rotary, finish_keys, inverse_frequencies, kernel_of, linear, project, turned
from swiftkv_jax.plan import ENCODER, SERVED, KVPlan
from swiftkv_jax.rope import NONE
from swiftkv_jax.shapes import Array, Float, Hidden, Int, KeyValues, PyTree, Queries, Weight

Pair = tuple[KeyValues, KeyValues]  # keys, values
PAGED = "paged_attention"
NOTHING = "inputs"  # name of an empty array, where nothing makes a row
_PIECE = 128  # numbers that one Hadamard matrix transforms, at most


@dataclasses.dataclass(frozen=True)
class Stored:
    """One array of a form: `heads` x `width` numbers per token; in 8 bits each head has a scale."""

    heads: int
    width: int


@dataclasses.dataclass(frozen=True)
class Paged:
    """The rows of a form in pages, and the blocks of queries that read them.

    Attributes:
      pools: one for each array of the form. row: of the pools.
      table: [Q, slots] page ids of each sequence. sequence: [b] of each block of queries.
      position: [b, C] of each query, -1 where there is none. window: keys a query sees, its own included.
      capacity: tokens that a sequence may hold. implementation: of the attention, by name, or None.
      bias: [N, S] of the scores, by head and distance; None without one.
    """

    pools: tuple[Pool, ...]
    row: int
    table: Int[Array, "Q slots"]
    sequence: Int[Array, " b"]
    position: Int[Array, "b C"]
    window: int
    capacity: int
    implementation: str | None
    bias: Float[Array, "N S"] | None = None

    @property
    def how(self) -> dict:
        """The options common to all attentions over pages."""
        options = {"row": self.row, "window": self.window, "implementation": self.implementation}
        return options | ({} if self.bias is None else {"bias": self.bias})

    @property
    def places(self) -> tuple[Array, Array, Array]:
        """The table, and the sequence and positions of each block."""
        return self.table, self.sequence, self.position


@runtime_checkable
class Form(Protocol):
    """A way to store and read a row.

    Attributes:
      operation: the one of kernels/ that reads it from pages.
      kept: weights that only checkpoints keep, so that other software can read the plain model.
      moved: weights that belong not to the row but to each attention that reads it.
    """

    operation: ClassVar[str]
    kept: ClassVar[tuple[str, ...]]
    moved: ClassVar[tuple[str, ...]]

    def refuses(self, config: ModelConfig) -> str:
        """Why a model of this shape cannot have such rows, in one line, or ""."""
        ...

    def arrays(self, config: ModelConfig) -> tuple[Stored, ...]:
        """The arrays that store a token."""
        ...

    def weights(self, config: ModelConfig) -> PyTree:
        """The tree of `Weight`s that make and read one row, but for those that are `moved`."""
        ...

    def reader_weights(self, config: ModelConfig) -> PyTree:
        """The `moved` `Weight`s of one attention."""
        ...

    def make(self, config: ModelConfig, p: PyTree, h: Hidden, at: Rotary) -> tuple[KeyValues, ...]:
        """The stored arrays [*batch, heads, width] of the normalised hidden states `h`."""
        ...

    def reader(self, p: PyTree) -> PyTree:
        """The part of a row's weights needed to read it, besides `moved` ones."""
        ...

    def keys_values(self, config: ModelConfig, reader: PyTree, made, at: Rotary) -> Pair:
        """Keys, ready for rotated queries, and values, from stored arrays of full sequences."""
        ...

    def read(self, config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Queries:
        """Attention of blocks of queries [b, C, N, H] over pages: [b, C, N, U]."""
        ...


class KeysValues:
    """Rotated keys and values: the usual KV cache."""

    operation: ClassVar[str] = PAGED
    kept: ClassVar[tuple[str, ...]] = ()
    moved: ClassVar[tuple[str, ...]] = ()

    def refuses(self, config: ModelConfig) -> str:
        return ""

    def arrays(self, config: ModelConfig) -> tuple[Stored, ...]:
        return (Stored(config.num_kv_heads, config.head_dim),) * 2

    def weights(self, config: ModelConfig) -> PyTree:
        norm = {"k_norm": head_norm(config, "E", config.kv_width)} if config.qk_norm else {}
        return _plain(config) | norm

    def reader_weights(self, config: ModelConfig) -> PyTree:
        return {}

    def make(self, config: ModelConfig, p: PyTree, h: Hidden, at: Rotary) -> tuple[KeyValues, ...]:
        keys = finish_keys(config, p, project(config, p["k_proj"], h), at)
        return keys, project(config, p["v_proj"], h)

    def reader(self, p: PyTree) -> PyTree:
        return {}

    def keys_values(self, config: ModelConfig, reader: PyTree, made, at: Rotary) -> Pair:
        return made

    def read(self, config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Queries:
        keys, values = paged.pools
        return paged_attention(q, (keys, values), *paged.places, **paged.how)


class Keys:
    """Keys alone, before rotation; values are keys times W_KV (Slim attention, arXiv 2503.05840).

    With biases, V = (K - b_K) W_KV + b_V: the bias of `kv_proj` is b_V - b_K W_KV. Attention weights sum to
    one, so it is added once to the weighted mean of values.
    """

    operation: ClassVar[str] = "k_cache_attention"
    kept: ClassVar[tuple[str, ...]] = ("v_proj",)
    moved: ClassVar[tuple[str, ...]] = ()

    def refuses(self, config: ModelConfig) -> str:
        if config.qk_norm:
            return "keys are normed after their projection, which no W_KV undoes"
        if config.rotary_dim < config.head_dim:
            return f"only {config.rotary_dim} of a key's {config.head_dim} numbers turn, and all or none must"
        return _clipped(config) or _undetermined(config, "keys", "values")

    def arrays(self, config: ModelConfig) -> tuple[Stored, ...]:
        return (Stored(1, config.kv_width),)  # in 8 bits, one scale a token

    def weights(self, config: ModelConfig) -> PyTree:
        return _plain(config) | {"kv_proj": _head_weights(config, config.kv_width, config.qkv_bias)}

    def reader_weights(self, config: ModelConfig) -> PyTree:
        return {}

    def make(self, config: ModelConfig, p: PyTree, h: Hidden, at: Rotary) -> tuple[KeyValues, ...]:
        return (linear(h, p["k_proj"])[..., None, :],)

    def reader(self, p: PyTree) -> PyTree:
        return p["kv_proj"]

    def keys_values(self, config: ModelConfig, reader: PyTree, made, at: Rotary) -> Pair:
        (keys,) = made
        heads = keys.reshape(*keys.shape[:-2], config.num_kv_heads, config.head_dim)
        return turned(config, heads, at), _heads_of(keys, reader) + _bias(reader, keys)

    def read(self, config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Queries:
        (pool,) = paged.pools
        mixed = k_cache_attention(
            q,
            (pool,),
            kernel_of(reader, q.dtype),
            *paged.places,
            frequencies=_frequencies(config, paged.capacity),
            # Queries carry the rotary attention factor; keys that are rotated when they are read do not.
            scale=config.head_dim**-0.5 * config.rope.attention_factor,
            **paged.how,
        )
        return mixed + _bias(reader, mixed)


class Values:
    """Values alone, without their bias; keys are values times W_VK (the paper's appendix).

    Only without rotary embedding. The bias of keys shifts all scores of a query alike, so it falls away.
    """

    operation: ClassVar[str] = "x_cache_attention"
    kept: ClassVar[tuple[str, ...]] = ("k_proj",)
    moved: ClassVar[tuple[str, ...]] = ()

    def refuses(self, config: ModelConfig) -> str:
        return _clipped(config) or _turned(config, "values") or _undetermined(config, "values", "keys")

    def arrays(self, config: ModelConfig) -> tuple[Stored, ...]:
        return (Stored(1, config.kv_width),)

    def weights(self, config: ModelConfig) -> PyTree:
        return _plain(config) | {"vk_proj": _head_weights(config, config.kv_width, False)}

    def reader_weights(self, config: ModelConfig) -> PyTree:
        return {}

    def make(self, config: ModelConfig, p: PyTree, h: Hidden, at: Rotary) -> tuple[KeyValues, ...]:
        alone = {name: leaf for name, leaf in p["v_proj"].items() if name != "bias"}
        return (linear(h, alone)[..., None, :],)

    def reader(self, p: PyTree) -> PyTree:
        return p["vk_proj"] | {"bias": p["v_proj"]["bias"]} if "bias" in p["v_proj"] else p["vk_proj"]

    def keys_values(self, config: ModelConfig, reader: PyTree, made, at: Rotary) -> Pair:
        (values,) = made
        heads = values.reshape(*values.shape[:-2], config.num_kv_heads, config.head_dim)
        return _heads_of(values, reader), heads + self._bias(config, reader, values)

    def read(self, config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Queries:
        heads, width = config.num_heads, config.head_dim
        own = jnp.eye(heads * width, dtype=q.dtype).reshape(-1, heads, width)  # a head's part of the sum
        mixed = _read_whole(config, q, kernel_of(reader, q.dtype), jnp.moveaxis(own, 1, 0), paged)
        return mixed + self._bias(config, reader, mixed)

    def _bias(self, config: ModelConfig, reader: PyTree, like: Float[Array, "*batch"]):
        if "bias" not in reader:
            return jnp.zeros((), like.dtype)
        return reader["bias"].reshape(config.num_heads, config.head_dim).astype(like.dtype)


class Inputs:
    """Normalised inputs; each reading attention makes keys and values from them (section 5).

    Only without rotary embedding. No matrix is inverted, so it is exact for any weights. No projection makes
    such a row, so layers with the same input can share it (the E-cache).
    """

    operation: ClassVar[str] = "x_cache_attention"
    kept: ClassVar[tuple[str, ...]] = ()
    moved: ClassVar[tuple[str, ...]] = ("k_proj", "v_proj")

    def refuses(self, config: ModelConfig) -> str:
        if config.num_heads != config.num_kv_heads:
            return (
                f"{config.num_heads} query heads share {config.num_kv_heads} kv heads: "
                "only multi-head models can"
            )
        if config.qk_norm:
            return "keys are normed after their projection, which no query can do in their place"
        return _clipped(config) or _turned(config, "inputs")

    def arrays(self, config: ModelConfig) -> tuple[Stored, ...]:
        return (Stored(1, config.hidden_size),)

    def weights(self, config: ModelConfig) -> PyTree:
        return {NOTHING: Weight((0,), ".")}  # stacks of it still give the number of rows

    def reader_weights(self, config: ModelConfig) -> PyTree:
        one = partial(_head_weights, config, config.hidden_size)
        return {"k_proj": one(config.qkv_bias and config.k_bias), "v_proj": one(config.qkv_bias)}

    def make(self, config: ModelConfig, p: PyTree, h: Hidden, at: Rotary) -> tuple[KeyValues, ...]:
        return (h[..., None, :],)

    def reader(self, p: PyTree) -> PyTree:
        return {}

    def keys_values(self, config: ModelConfig, reader: PyTree, made, at: Rotary) -> Pair:
        (x,) = made
        return _heads_of(x, reader["k_proj"]), _heads_of(x, reader["v_proj"]) + _bias(reader["v_proj"], x)

    def read(self, config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Queries:
        w_k, w_v = (kernel_of(reader[name], q.dtype) for name in ("k_proj", "v_proj"))
        mixed = _read_whole(config, q, w_k, w_v, paged)
        return mixed + _bias(reader["v_proj"], mixed)


class HadamardInputs(Inputs):
    """Inputs as an engine stores them: after a Hadamard transform, with reading weights for that basis (see
    `surgery.hadamard_inputs`).

    In real models a few channels of a hidden state are tens of times larger than the rest, and rounding one
    of them moves all keys in one direction. Spread over many channels, the errors are independent and partly
    cancel; in 8 bits a row's scale is smaller too. QuaRot (arXiv 2404.00456) does the same for activations.
    """

    def make(self, config: ModelConfig, p: PyTree, h: Hidden, at: Rotary) -> tuple[KeyValues, ...]:
        return (hadamard(h)[..., None, :],)


def hadamard(x: Float[Array, "*batch w"], inverse: bool = False) -> Float[Array, "*batch w"]:
    """Each piece of the last axis times a Hadamard matrix, in x's dtype.

    A piece is the largest power of two that divides the width, up to 128. With `inverse` the result of the
    transform is transformed back; the factor of each way is a power of two, which no dtype rounds.
    """
    piece = math.gcd(x.shape[-1], _PIECE)
    halvings = piece.bit_length() - 1
    factor = 0.5 ** (halvings - halvings // 2 if inverse else halvings // 2)
    cut = x.reshape(*x.shape[:-1], -1, piece)
    matrix = jnp.asarray(factor * scipy.linalg.hadamard(piece), x.dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    made = jnp.matmul(cut, matrix, precision="highest", preferred_element_type=wide)
    return made.astype(x.dtype).reshape(x.shape)


def _frequencies(config: ModelConfig, capacity: int) -> Array | None:
    return None if config.rope.rope_type == NONE else inverse_frequencies(config, capacity)


def _read_whole(config: ModelConfig, q: Queries, w_k: Array, w_v: Array, paged: Paged) -> Queries:
    """Attention over whole rows: scores through `w_k`, and `w_v` applied to the weighted sum."""
    (pool,) = paged.pools
    return x_cache_attention(q, (pool,), w_k, w_v, *paged.places, scale=config.head_dim**-0.5, **paged.how)


def _heads_of(made: Float[Array, "*batch 1 E"], p: PyTree) -> KeyValues:
    """A stored array times a kernel by head, [N, E, H]."""
    return jnp.einsum("...e,neh->...nh", made[..., 0, :], kernel_of(p, made.dtype))


def _bias(p: PyTree, like: Float[Array, "*batch"]) -> Float[Array, "*heads"]:
    return p["bias"].astype(like.dtype) if "bias" in p else jnp.zeros((), like.dtype)


def _undetermined(config: ModelConfig, stored: str, made: str) -> str:
    """Why the stored keys or values do not determine the other ones, or ""."""
    if config.kv_width < config.hidden_size:
        return (
            f"{config.num_kv_heads} kv heads of {config.head_dim} make {config.kv_width} columns of "
            f"{config.hidden_size} inputs: {stored} do not determine {made}"
        )
    if config.num_heads != config.num_kv_heads:
        return (
            f"{config.num_heads} query heads share {config.num_kv_heads} kv heads: only multi-head models can"
        )
    return ""


def _clipped(config: ModelConfig) -> str:
    return (
        f"keys and values are clipped at {config.clip_qkv}, which nothing undoes" if config.clip_qkv else ""
    )


def _turned(config: ModelConfig, stored: str) -> str:
    turned = config.rope.rope_type != NONE
    return (
        f"rotary embedding is applied between {stored} and keys: only models without it can" if turned else ""
    )


def reader_of(form: Form, reader: PyTree, attention: PyTree) -> PyTree:
    """All weights needed to read a row: the row's part, and those of the attention that reads it."""
    return reader | {name: attention[name] for name in form.moved}


def has_fill(config: ModelConfig, plan: KVPlan) -> bool:
    """Whether the plan has rows for a fused fill, and the fused fill supports the model."""
    return plan.has_fill and config.fused_fill


FORMS: dict[str, Form] = {
    "kv": KeysValues(),
    "k": Keys(),
    "v": Values(),
    "x": Inputs(),
    SERVED["x"]: HadamardInputs(),
}


def check(config: ModelConfig, plan: KVPlan) -> None:
    """Check that a model of this shape can have the rows of `plan`.

    Raises:
      UsageError: it has another number of layers, or a form does not fit it.
    """
    if plan.num_layers != config.num_layers:
        raise UsageError(f"the plan has {plan.num_layers} layers, the model {config.num_layers}")
    for form in dict.fromkeys((*plan.forms, *plan.cross_forms)):
        if reason := FORMS[form].refuses(config):
            raise UsageError(f"rows cannot be stored as {form!r}: {reason}")
    if plan.cross and config.encoder is None:
        raise UsageError(f"cross-attention rows need an encoder, which {config.family} has not")
    if config.encoder is not None and plan.forms_of(ENCODER) == ():
        raise UsageError(f"layers of {config.family} read an encoder's output: give the plan with_cross()")


def linear_weights(inside: tuple[str, int], outside: tuple[str, int], bias: bool, std: float) -> PyTree:
    """The `Weight`s of one `linear`; `inside` and `outside` are its input and output (axis letter, width)."""
    kernel = Weight((inside[1], outside[1]), f"{inside[0]} {outside[0]}", std)
    return {"kernel": kernel} | ({"bias": Weight((outside[1],), outside[0])} if bias else {})


def head_norm(config: ModelConfig, letter: str, width: int) -> Weight:
    """The gain of a norm of queries or keys, whose heads are `width` wide together and have axis `letter`."""
    return (
        Weight((width,), letter, fill=1.0)
        if config.qk_norm_whole
        else Weight((config.head_dim,), ".", fill=1.0)
    )


def _head_weights(config: ModelConfig, width: int, bias: bool) -> PyTree:
    """The `Weight`s of a projection of rows `width` wide whose outputs are cut into heads; the `width` axis
    is sharded as the model width is."""
    heads, out = config.num_heads, config.head_dim
    kernel = {"kernel": Weight((heads, width, out), "N D .", std=width**-0.5)}
    return kernel | ({"bias": Weight((heads, out), "N .")} if bias else {})


def rounded(made: tuple[KeyValues, ...], dtype: str) -> tuple[KeyValues, ...]:
    """Stored arrays after rounding by a cache of `dtype`, in their own dtype; "auto" is a cache in it too."""
    if dtype == "auto":
        return made

    def one(x: KeyValues) -> KeyValues:
        # Without the barrier XLA's compiler for GPUs leaves out a conversion to a narrower float and back.
        data, scale = jax.lax.optimization_barrier(encode(x, dtype))
        back = data.astype(x.dtype)
        return back if scale is None else (back * scale[..., None]).astype(x.dtype)

    return tuple(map(one, made))


def _plain(config: ModelConfig) -> PyTree:
    """The projections of keys and values."""
    one = partial(linear_weights, ("D", config.hidden_size), ("E", config.kv_width))
    return {"k_proj": one(config.qkv_bias and config.k_bias, 0.02), "v_proj": one(config.qkv_bias, 0.02)}
