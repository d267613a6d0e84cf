"""What a layer does after its attention in C++, for CPUs: `native_cpu.cc`, called through XLA's FFI.

XLA gives a product of few rows to one thread, and asks for its weights when it needs them. Here every thread
takes some tokens through all of it, and each strip of a weight is asked for while the one before is used.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels import native

_SOURCE = Path(__file__).with_name("native_cpu.cc")
_TARGET = "swiftkv_after_attention"
_TOKENS = range(48, 129)  # fewer are not worth reading the weights in every thread; more are as fast by XLA
_MULTIPLE = 16  # of widths: the numbers of a vector, where it has most


def refuses(x, mixed, p, **_) -> str:
    """What of a call is not supported, or ""."""
    if x.ndim != 2 or len(x) not in _TOKENS:
        return f"x of shape {x.shape}: [T, D] with T from {_TOKENS[0]} to {_TOKENS[-1]}"
    if "gate_up_proj" not in p:
        return "gate_proj and up_proj apart: one gate_up_proj [D, 2, F]"
    used = (
        x,
        mixed,
        *jax.tree.leaves([p[name] for name in ("o_proj", "post_norm", "gate_up_proj", "down_proj")]),
    )
    if other := {str(leaf.dtype) for leaf in used} - {"float32"}:
        return f"{' and '.join(sorted(other))}: float32"
    if any(width % _MULTIPLE for width in p["down_proj"]["kernel"].shape):
        return f"down_proj of shape {p['down_proj']['kernel'].shape}: multiples of {_MULTIPLE}"
    return native.refuses(_SOURCE, AfterAttention=_TARGET)


def after_attention(x, mixed, p, *, eps: float):
    """As `api.after_attention`."""
    weights = [p["post_norm"]]
    for name in ("o_proj", "gate_up_proj", "down_proj"):
        weights += [p[name]["kernel"], p[name].get("bias", jnp.zeros(0))]
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype), vmap_method="sequential")
    return call(x, mixed, *weights, eps=eps)
