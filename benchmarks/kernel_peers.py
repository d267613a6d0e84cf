"""Other libraries' attention for single queries and chunks, on keys and values of ones."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.paged_attention.cases import Case


def peers(case: Case) -> dict[str, Callable[[], Callable]]:
    """Name -> a function that builds the call, which raises where its library or shape is missing: jax.nn by
    XLA and cuDNN, the kernels for pages of cuDNN, JAX and the deprecated Triton, and torch."""
    if case.scaled or case.window:
        return {}
    makers = {
        **{f"jax.nn {name}, contiguous": functools.partial(contiguous, name) for name in ("xla", "cudnn")},
        "cuDNN, pages": cudnn_paged,
        "Pallas Triton (deprecated)": triton_paged,
        "JAX TPU paged, pool as ours": tpu_paged,
        "JAX TPU ragged paged, its own pool": tpu_ragged,
        **{f"torch {name}": functools.partial(torch_dense, name) for name in ("SDPA", "FlexAttention")},
    }
    return {name: functools.partial(make, case) for name, make in makers.items()}


def in_order(case: Case) -> tuple[jax.Array, jax.Array, int]:
    """(tokens of each sequence, its pages in order, all pages)."""
    pages = len(case.lengths) * case.held
    table = jnp.arange(pages, dtype=jnp.int32).reshape(len(case.lengths), -1)
    return jnp.array(case.lengths, jnp.int32), table, pages


def contiguous(name: str, case: Case) -> Callable:
    """jax.nn's attention by an implementation."""
    q = jnp.ones((len(case.lengths), case.queries, case.heads, case.width), jnp.dtype(case.computed))
    k = jnp.ones((len(case.lengths), max(case.lengths), case.kv_heads, case.width), q.dtype)
    run = functools.partial(jax.nn.dot_product_attention, implementation=name)
    return functools.partial(jax.jit(run), q, k, k)


def cudnn_paged(case: Case) -> Callable:
    """cuDNN's paged attention, pages in order; its name in JAX is private."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    (lengths, table, pages), blocks = in_order(case), len(case.lengths)
    k = jnp.ones((pages, case.page, case.kv_heads, case.width), jnp.dtype(case.computed))
    q = jnp.ones((blocks, case.queries, case.heads, case.width), k.dtype)
    table = table.reshape(blocks, 1, case.held, 1)
    sizes = jnp.full(blocks, case.queries, jnp.int32), lengths
    run = functools.partial(paged_attention, scale=case.width**-0.5, mask_type=MaskType.PADDING)
    return functools.partial(jax.jit(run), q, k, k, *sizes, table, table)


def triton_paged(case: Case) -> Callable:
    """JAX's deprecated Triton kernel: one sequence a block, one query each, pages in order."""
    from jax.experimental.pallas.ops.gpu import paged_attention as triton

    lengths, table, pages = in_order(case)
    k = jnp.ones((case.kv_heads, pages, case.page, case.width), jnp.dtype(case.computed))
    q = jnp.ones((len(lengths), case.heads, case.width), k.dtype)
    return functools.partial(jax.jit(triton.paged_attention), q, k, k, table, lengths)


def tpu_paged(case: Case) -> Callable:
    """JAX's TPU kernel for pages. It expects heads first; here a row of all heads counts as one head, with
    each query at its own head's columns and zeros elsewhere."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    if case.queries > 1:
        raise ValueError("one query of a sequence")
    (lengths, table, pages), row = in_order(case), case.kv_heads * case.width
    blocks = len(lengths)
    k = jnp.ones((1, pages, case.page, row), jnp.dtype(case.computed))
    q = jnp.ones((blocks, case.heads, case.width), k.dtype)

    def run(q, k, lengths, table):
        place = jnp.repeat(jnp.eye(case.kv_heads, dtype=q.dtype), case.heads // case.kv_heads, axis=0)
        spread = jnp.einsum("bnh,nk->bnkh", q, place).reshape(blocks, case.heads, row)
        out = paged_attention(spread, k, k, lengths, table, pages_per_compute_block=min(8, case.held))
        return jnp.einsum("bnkh,nk->bnh", out.reshape(*out.shape[:2], case.kv_heads, -1), place)

    return functools.partial(jax.jit(run), q, k, lengths, table)


def tpu_ragged(case: Case) -> Callable:
    """JAX's ragged kernel with its own block sizes, keys and values head by head in one pool."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    (lengths, table, pages), blocks = in_order(case), len(case.lengths)
    kv = jnp.ones((pages, case.page, 2 * case.kv_heads, case.width), jnp.dtype(case.computed))
    q = jnp.ones((blocks * case.queries, case.heads, case.width), kv.dtype)
    starts = case.queries * jnp.arange(blocks + 1, dtype=jnp.int32)
    sizes = lengths, table, starts, jnp.array([blocks], jnp.int32)
    run = functools.partial(ragged_paged_attention, sm_scale=case.width**-0.5)
    return functools.partial(jax.jit(run), q, kv, *sizes)


def torch_dense(name: str, case: Case) -> Callable:
    """torch's scaled_dot_product_attention or FlexAttention on a GPU, keys and values contiguous."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.cuda.is_available():
        raise RuntimeError("torch has no GPU here")
    shape = (len(case.lengths), case.kv_heads, max(case.lengths), case.width)
    k = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
    q = torch.ones((shape[0], case.heads, case.queries, case.width), dtype=k.dtype, device="cuda")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    attend = sdpa if name == "SDPA" else torch.compile(flex_attention)

    def run():
        attend(q, k, k, enable_gqa=True)
        torch.cuda.synchronize()

    return run
