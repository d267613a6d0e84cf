"""The forms of cache rows, how they are made, stored and read: one small class for each.

This file and latent.py are the only ones in which forms differ. A form defines the arrays that store a row,
the weights that make it, how they make it, how a query reads it (from full sequences in training, from pages
in serving), and how these weights follow from those of plain keys and values. Nothing else names a row's
projections, but for the tensor names of checkpoints.
"""

from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.common.errors import UsageError, suggest
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import ENCODER, SERVED, KVPlan
from swiftkv_jax.config.rope import NONE
from swiftkv_jax.core import matrices
from swiftkv_jax.core.form import PAGED, Form, Paged, Pair, Raw, Stored
from swiftkv_jax.core.latent import Latents
from swiftkv_jax.core.layers import (
    Rotary,
    effective_gain,
    head_norm,
    in_heads,
    inverse_frequencies,
    kernel_of,
    linear,
    linear_weights,
    norm_heads,
    turned,
)
from swiftkv_jax.core.shapes import Array, Float, Hidden, KeyValues, PyTree, Queries, Weight
from swiftkv_jax.kernels.common.pools import encode
from swiftkv_jax.kernels.fused_kv_fill.api import Makers, fold_gain
from swiftkv_jax.kernels.k_cache_attention.api import k_cache_attention, x_cache_attention
from swiftkv_jax.kernels.paged_attention.api import paged_attention

NOTHING = "inputs"  # name of an empty array, where nothing makes a row


class KeysValues(Form):
    """Rotated keys and values: the usual KV cache."""

    operation: ClassVar[str] = PAGED
    projections: ClassVar[tuple[str, ...]] = ("k_proj", "v_proj")

    def arrays(self, config: ModelConfig) -> tuple[Stored, ...]:
        return (Stored(config.num_kv_heads, config.head_dim),) * 2

    def weights(self, config: ModelConfig) -> PyTree:
        norm = {"k_norm": head_norm(config, "E", config.kv_width)} if config.qk_norm else {}
        return _plain(config) | norm

    def unturned(self, config: ModelConfig, p: PyTree, raw: Raw) -> Pair:
        """Keys, normed where the model norms them and before their rotation, and values."""
        keys, values = (in_heads(config, x) for x in raw)
        return norm_heads(config, keys, p["k_norm"]) if "k_norm" in p else keys, values

    def finish(self, config: ModelConfig, p: PyTree, raw: Raw, at: Rotary) -> tuple[KeyValues, ...]:
        keys, values = self.unturned(config, p, raw)
        return turned(keys, at), values

    def keys_values(self, config: ModelConfig, reader: PyTree, made, at: Rotary) -> Pair:
        return made

    def read(self, config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Queries:
        keys, values = paged.pools
        softcap = config.attention_softcap
        return paged_attention(q, (keys, values), *paged.places, softcap=softcap, **paged.how)

    def fused(self, config: ModelConfig, p: PyTree, gain: Float[Array, " D"] | None) -> Makers:
        """The weights of the fused fill, of a stack of rows; `gain` of a norm before them is folded in."""
        keys, values = (p[name] for name in self.projections)
        w_k, w_v = kernel_of(keys), kernel_of(values)
        if gain is not None:
            w_k, w_v = fold_gain(gain, w_k), fold_gain(gain, w_v)
        k_norm = effective_gain(config, p["k_norm"]) if "k_norm" in p else None
        return Makers(w_k, w_v, keys.get("bias"), values.get("bias"), k_norm)


class OneOfTwo(Form):
    """Keys or values alone, the first of `pair`; a matrix recovers the second (Slim attention, arXiv
    2503.05840): second - its bias = (stored - `origin`) matrix.

    Attributes:
      pair: the projections of what is stored and of what is recovered. matrix: name of its weights.
    """

    pair: ClassVar[tuple[str, str]]
    matrix: ClassVar[str]

    def arrays(self, config: ModelConfig) -> tuple[Stored, ...]:
        return (Stored(1, config.kv_width),)  # in 8 bits, one scale a token

    def finish(self, config: ModelConfig, p: PyTree, raw: Raw, at: Rotary) -> tuple[KeyValues, ...]:
        return (raw[0][..., None, :],)

    def kernels(self, p: PyTree) -> tuple[np.ndarray, np.ndarray]:
        """The kernels of `pair`, in float64."""
        stored, other = (np.asarray(kernel_of(p[name]), np.float64) for name in self.pair)
        return stored, other

    def origin(self, p: PyTree) -> np.ndarray:
        """The bias of what is stored, in float64; 0 where it is stored without."""
        return np.zeros(())

    def convert(self, config: ModelConfig, plain: PyTree, solved, names) -> PyTree:
        names = [f"{name}: W_{self.pair[0][0].upper()}" for name in names]
        dtype = kernel_of(plain[self.pair[0]]).dtype
        found = matrices.between_rows(*self.kernels(plain), solved, dtype, names)
        out = {"kernel": found} | self._matrix_bias(plain, found)
        cut = {name: matrices.heads_first(jnp.asarray(x, dtype), config.num_heads) for name, x in out.items()}
        return plain | {self.matrix: cut}

    def _matrix_bias(self, plain: PyTree, kernels: np.ndarray) -> PyTree:
        return {}


class Keys(OneOfTwo):
    """Keys alone, before rotation; values are keys times W_KV.

    With biases, V = (K - b_K) W_KV + b_V: the bias of `kv_proj` is b_V - b_K W_KV. Attention weights sum to
    one, so it is added once to the weighted mean of values.
    """

    operation: ClassVar[str] = "k_cache_attention"
    projections: ClassVar[tuple[str, ...]] = ("k_proj",)
    kept: ClassVar[tuple[str, ...]] = ("v_proj",)
    pair: ClassVar[tuple[str, str]] = ("k_proj", "v_proj")
    matrix: ClassVar[str] = "kv_proj"

    def refuses(self, config: ModelConfig) -> str:
        if config.qk_norm:
            return "keys are normed after their projection, which no W_KV undoes"
        if config.rotary_dim < config.head_dim:
            return f"only {config.rotary_dim} of a key's {config.head_dim} numbers turn, and all or none must"
        if len(config.tables) > 1 or config.rope.interleaved:
            return "keys are rotated in another way than the kernels that read such rows do"
        return _unread(config) or _undetermined(config, "keys", "values")

    def weights(self, config: ModelConfig) -> PyTree:
        return _plain(config) | {"kv_proj": _head_weights(config, config.kv_width, config.qkv_bias)}

    def reader(self, p: PyTree) -> PyTree:
        return p["kv_proj"]

    def keys_values(self, config: ModelConfig, reader: PyTree, made, at: Rotary) -> Pair:
        (keys,) = made
        heads = keys.reshape(*keys.shape[:-2], config.num_kv_heads, config.head_dim)
        return turned(heads, at), _heads_of(keys, reader) + _bias(reader, keys)

    def read(self, config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Queries:
        (pool,), rope = paged.pools, config.tables[0]
        mixed = k_cache_attention(
            q,
            (pool,),
            kernel_of(reader, q.dtype),
            *paged.places,
            frequencies=None if rope.rope_type == NONE else inverse_frequencies(config, paged.capacity, rope),
            # Queries carry the rotary attention factor; keys that are rotated when they are read do not.
            scale=config.head_dim**-0.5 * rope.attention_factor,
            **paged.how,
        )
        return mixed + _bias(reader, mixed)

    def origin(self, p: PyTree) -> np.ndarray:
        return np.asarray(p["k_proj"].get("bias", 0.0), np.float64)

    def _matrix_bias(self, plain: PyTree, kernels: np.ndarray) -> PyTree:
        if "bias" not in plain["v_proj"]:
            return {}
        bias = np.asarray(plain["v_proj"]["bias"], np.float64)
        off = np.einsum("ne,nef->nf", self.origin(plain), kernels) if "bias" in plain["k_proj"] else 0.0
        return {"bias": bias - off}


class Values(OneOfTwo):
    """Values alone, without their bias; keys are values times W_VK (the paper's appendix).

    Only without rotary embedding. The bias of keys shifts all scores of a query alike, so it falls away.
    """

    operation: ClassVar[str] = "x_cache_attention"
    projections: ClassVar[tuple[str, ...]] = ("v_proj",)
    kept: ClassVar[tuple[str, ...]] = ("k_proj",)
    pair: ClassVar[tuple[str, str]] = ("v_proj", "k_proj")
    matrix: ClassVar[str] = "vk_proj"

    def refuses(self, config: ModelConfig) -> str:
        return _unread(config) or _turned(config, "values") or _undetermined(config, "values", "keys")

    def weights(self, config: ModelConfig) -> PyTree:
        return _plain(config) | {"vk_proj": _head_weights(config, config.kv_width, False)}

    def project(self, p: PyTree, h: Hidden) -> Raw:
        return (linear(h, {name: leaf for name, leaf in p["v_proj"].items() if name != "bias"}),)

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


class Inputs(Form):
    """Normalised inputs; each reading attention makes keys and values from them (section 5).

    Only without rotary embedding. No matrix is inverted, so it is exact for any weights. No projection makes
    such a row, so layers with the same input can share it (the E-cache).
    """

    operation: ClassVar[str] = "x_cache_attention"
    moved: ClassVar[tuple[str, ...]] = ("k_proj", "v_proj")

    def refuses(self, config: ModelConfig) -> str:
        if config.num_heads != config.num_kv_heads:
            return (
                f"{config.num_heads} query heads share {config.num_kv_heads} kv heads: "
                "only multi-head models can"
            )
        if config.qk_norm:
            return "keys are normed after their projection, which no query can do in their place"
        return _unread(config) or _turned(config, "inputs")

    def arrays(self, config: ModelConfig) -> tuple[Stored, ...]:
        return (Stored(1, config.hidden_size),)

    def weights(self, config: ModelConfig) -> PyTree:
        return {NOTHING: Weight((0,), ".")}  # stacks of it still give the number of rows

    def reader_weights(self, config: ModelConfig) -> PyTree:
        one = partial(_head_weights, config, config.hidden_size)
        return {"k_proj": one(config.qkv_bias and config.k_bias), "v_proj": one(config.qkv_bias)}

    def project(self, p: PyTree, h: Hidden) -> Raw:
        return (h,)

    def finish(self, config: ModelConfig, p: PyTree, raw: Raw, at: Rotary) -> tuple[KeyValues, ...]:
        return (raw[0][..., None, :],)

    def keys_values(self, config: ModelConfig, reader: PyTree, made, at: Rotary) -> Pair:
        (x,) = made
        return _heads_of(x, reader["k_proj"]), _heads_of(x, reader["v_proj"]) + _bias(reader["v_proj"], x)

    def read(self, config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Queries:
        w_k, w_v = (kernel_of(reader[name], q.dtype) for name in ("k_proj", "v_proj"))
        mixed = _read_whole(config, q, w_k, w_v, paged)
        return mixed + _bias(reader["v_proj"], mixed)

    def convert(self, config: ModelConfig, plain: PyTree, solved, names) -> PyTree:
        return {NOTHING: jnp.zeros((len(names), 0), kernel_of(plain["k_proj"]).dtype)}

    def convert_reader(self, config: ModelConfig, plain: PyTree) -> PyTree:
        cut = partial(matrices.heads_first, heads=config.num_heads)
        return {name: {part: cut(leaf) for part, leaf in plain[name].items()} for name in self.moved}


class HadamardInputs(Inputs):
    """Inputs as an engine stores them: after a Hadamard transform, with reading weights for that basis (see
    `surgery.hadamard_inputs`).

    In real models a few channels of a hidden state are tens of times larger than the rest, and rounding one
    of them moves all keys in one direction. Spread over many channels, the errors are independent and partly
    cancel; in 8 bits a row's scale is smaller too. QuaRot (arXiv 2404.00456) does the same for activations.
    """

    def project(self, p: PyTree, h: Hidden) -> Raw:
        return (matrices.hadamard(h),)


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


def _unread(config: ModelConfig) -> str:
    """Why kernels that read other rows than keys and values do not compute this model's scores, or ""."""
    if config.attention_softcap:
        return "the kernels that read such rows have no soft cap of scores"
    if config.sizes:
        return "its layers have different numbers of heads"
    return (
        f"keys and values are clipped at {config.clip_qkv}, which nothing undoes" if config.clip_qkv else ""
    )


def _turned(config: ModelConfig, stored: str) -> str:
    turned = any(rope.rope_type != NONE for rope in config.tables)
    return (
        f"rotary embedding is applied between {stored} and keys: only models without it can" if turned else ""
    )


def reader_of(form: Form, reader: PyTree, attention: PyTree) -> PyTree:
    """All weights needed to read a row: the row's part, and those of the attention that reads it."""
    return reader | {name: attention[name] for name in form.moved}


PLAIN = KeysValues()
SLIM: dict[str, OneOfTwo] = {"k": Keys(), "v": Values()}
FORMS: dict[str, Form] = {
    "kv": PLAIN,
    **SLIM,
    "x": Inputs(),
    "latent": Latents(),
    SERVED["x"]: HadamardInputs(),
}


def check(config: ModelConfig, plan: KVPlan) -> None:
    """Check that a model of this shape can have the rows of `plan`."""
    if plan.num_layers != config.num_layers:
        raise UsageError(f"the plan has {plan.num_layers} layers, the model {config.num_layers}")
    for form in dict.fromkeys((*plan.forms, *plan.cross_forms)):
        if form not in FORMS:
            known = [name for name in FORMS if name not in SERVED.values()]
            raise UsageError(f"rows have no form {form!r}; known: {', '.join(known)}{suggest(form, known)}")
        if (form == "latent") != (config.form == "latent"):
            what = "latents" if config.latent else "keys and values"
            raise UsageError(
                f"rows cannot be stored as {form!r}: {config.family} stores {what}; `config.plan()` says so"
            )
        if reason := FORMS[form].refuses(config):
            raise UsageError(f"rows cannot be stored as {form!r}: {reason}")
    for number, row in enumerate(plan.rows):
        heads = {layer: config.kinds[layer].sizes[:2] for layer in (row.maker, *plan.readers(number))}
        if len(set(heads.values())) > 1:
            listed = ", ".join(f"layer {layer} has {n} and {k}" for layer, (n, k) in heads.items())
            raise UsageError(f"layers that share a row need the same numbers of query and kv heads: {listed}")
    if plan.cross and config.encoder is None:
        raise UsageError(f"cross-attention rows need an encoder, which {config.family} has not")
    if config.encoder is not None and plan.forms_of(ENCODER) == ():
        raise UsageError(f"layers of {config.family} read an encoder's output: give the plan with_cross()")
    if config.exit_head and not plan.has_shared_norm:
        raise UsageError(
            "an exit head reads the hidden states entering a SwiftKV plan's split; this plan has none: "
            "use KVPlan.swiftkv, or exit_head=False"
        )
    if config.exit_head and plan.tail:
        raise UsageError(f"an exit head needs rows made at the split, without a tail of {plan.tail} tokens")


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
