"""Paged attention: every implementation equals its definition, and the definition equals the cache's own."""

import dataclasses
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from tiny_models import sized

from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.cache import Cache, make_batch
from swiftkv_jax.kernels.check.calls import verdict
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.mask import visible
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.paged_attention import (
    api,
    cases,
    jax_nn,
    native_cpu,
    pallas_gpu,
    pallas_tpu,
    reference,
    xla,
)

QUICK = ("lengths", "chunk", "window", "bfloat16", "int8_chunk")  # by default; the others are slow
SLOW = [name for name in cases.SMALL if name not in QUICK]
OF_XLA = [name for name in cases.SMALL if not name.startswith("width")]  # which treats all widths alike


def alone(case: cases.Case, run, **options):
    """An implementation without its door, which gives keys and values of one pool as one array."""
    options |= {name: value for name, value in case.options.items() if name != "value"}

    def attend(q, k, v, *rest, **arrays):
        return run(q, k, k if case.shared else v, *rest, **arrays, **options)[..., : case.shared or None]

    return attend


def exact(case: cases.Case, args, arrays) -> np.ndarray:
    """The definition in float64, of the same rounded inputs."""
    with jax.enable_x64(True):
        q, k, v, *rest = args
        wide = [a.astype(jnp.float64) for a in (q, k, v)]
        arrays = {name: None if a is None else a.astype(jnp.float64) for name, a in arrays.items()}
        run = jax.jit(alone(case, reference.paged_attention))
        return np.asarray(run(*wide, *rest, **arrays))


def interpreted(case: cases.Case, pages: int = 2):
    """The TPU kernel on this CPU."""
    return alone(case, pallas_tpu.paged_attention, pages=pages, interpret=True)


def by_xla(case: cases.Case):
    """Through the door, by name."""
    return functools.partial(cases.call, **case.options, implementation="xla")


def by_native(case: cases.Case):
    """Through the door, by name."""
    return functools.partial(cases.call, **case.options, implementation="native_cpu")


NEEDS_COMPILER = pytest.mark.skipif(
    bool(native_cpu.refuses(*cases.SMALL["lengths"].shapes()[0])), reason="needs a C++ compiler"
)


def agree(case: cases.Case, run, tolerance: float | None = None):
    args, arrays = case.make()
    want, got = exact(case, args, arrays), np.asarray(jax.jit(run)(*args, **arrays), np.float64)
    error, tolerance = np.abs(got - want).max(), tolerance or case.tolerance
    assert error <= tolerance * max(np.abs(want).max(), 1e-30), error
    assert (got[np.array(case.lengths) == 0] == 0).all()


@pytest.mark.slow(*SLOW)
@pytest.mark.parametrize("name", OF_XLA)
def test_xla_agrees_with_the_definition(name):
    agree(cases.SMALL[name], by_xla(cases.SMALL[name]))


@pytest.mark.slow(*(f"{name}-{1 << 16}" for name in SLOW))
@pytest.mark.parametrize(
    "name, room", [(n, 1 << 16) for n in OF_XLA if n not in QUICK[:2]] + [(n, 1 << 28) for n in QUICK[:2]]
)
def test_xla_agrees_in_one_turn(name, room, monkeypatch):
    """In groups of sequences, and of all at once."""
    monkeypatch.setattr(xla, "ONE_TURN_BYTES", room)
    case = cases.SMALL[name]
    agree(case, functools.partial(cases.call, **case.options, implementation="xla_one_turn"))


@pytest.mark.parametrize(("stored", "window", "room"), [("float32", None, 1 << 16), ("int8", 40, 1 << 28)])
def test_xla_agrees_in_one_turn_on_the_blocks_of_one_sequence(stored, window, room, monkeypatch):
    """Its last block is begun, and a step with room for more tokens has empty ones; unseen rows are NaN."""
    monkeypatch.setattr(xla, "ONE_TURN_BYTES", room)
    sizes = {"width": 16, "stored": stored, "page": 16, "slots": 8, "capacity": 256}
    case = cases.Case(lengths=(127,), queries=50, block=8, most=9, window=window, **sizes)
    result = verdict([("", case)], "xla_one_turn")
    assert result["right"], result


def test_one_turn_is_of_matrix_products_on_a_tpu(monkeypatch):
    """On CPUs and GPUs, where single queries read rows in place, there is no matrix product."""
    case = cases.SMALL["lengths"]
    run = functools.partial(cases.call, **case.options, implementation="xla_one_turn")

    def products():
        args, arrays = case.shapes()
        return jax.jit(lambda *a, **k: run(*a, **k)).lower(*args, **arrays).as_text().count("dot_general")

    assert not products()
    monkeypatch.setattr(dispatch, "device", lambda: ("tpu", "a TPU", 1))
    assert products()
    agree(case, lambda *a, **k: run(*a, **k))


@pytest.mark.parametrize("room", [1 << 28, 1 << 16], ids=["whole", "in groups"])
def test_one_turn_has_no_loop_of_unknown_length(room, monkeypatch):
    """In a `while` whose length only the device knows, a GPU asks the host at every turn."""
    monkeypatch.setattr(xla, "ONE_TURN_BYTES", room)
    case = dataclasses.replace(cases.SMALL["long_chunk"], lengths=(70, 100, 3), slots=128)
    for queries in (1, 64):
        args, arrays = dataclasses.replace(case, queries=queries).shapes()

        def loops(name, args=args, arrays=arrays):
            run = jax.jit(functools.partial(cases.call, **case.options, implementation=name))
            text = run.lower(*args, **arrays).compile().as_text()
            lines = [line for line in text.splitlines() if " while(" in line]
            return [line for line in lines if "known_trip_count" not in line], lines

        assert loops("xla")[0] and not loops("xla_one_turn")[0]
        assert bool(loops("xla_one_turn")[1]) == (room == 1 << 16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "device", lambda: ("gpu", "a GPU", 1))
            assert not loops("xla")[0]


def in_two_parts(case: cases.Case):
    return functools.partial(jax_nn.paged_attention, **case.options, by=jax_nn.by_xla)


EMPTY_QUERIES = cases.Case(lengths=(3, 0, 33, 100), queries=40, page=32)  # before the others, and all of them


@pytest.mark.parametrize(
    "case", [cases.SMALL[n] for n in ("lengths", "gqa4", "long_chunk", "int8")] + [EMPTY_QUERIES]
)
def test_cudnns_chunk_and_prefix_merged_agree_with_the_definition(case):
    agree(case, in_two_parts(case), tolerance=1e-6)


def test_two_parts_of_a_ragged_batch_leave_padding_out():
    """As in the cache, there is padding behind the queries, pages are unwritten, and all of these are NaN."""
    case = cases.Case(lengths=(64,) * 3, queries=32)
    (q, k, v, table, sequence, position), arrays = case.make()
    position = position.at[1, 5:].set(-1).at[2].set(-1)
    q = jnp.where(position[..., None, None] < 0, jnp.nan, q)
    k, v = (x.at[1, table[1, 2:]].set(jnp.nan).at[1, table[2]].set(jnp.nan) for x in (k, v))
    got = jax.jit(in_two_parts(case))(q, k, v, table, sequence, position, **arrays)
    clean = jnp.where(position[..., None, None] < 0, 0, q)
    want = jax.jit(functools.partial(cases.call, **case.options, implementation="reference"))(
        clean, k, v, table, sequence, position, **arrays
    )
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_pages_of_one_sequence_are_gathered_once_for_all_its_blocks():
    """A lone prompt's chunk in 8 blocks, the last of them empty; and what each part is given."""
    case = cases.Case(lengths=(100,), queries=80, page=32)
    (q, k, v, table, sequence, position), arrays = case.make()
    want = jax.jit(functools.partial(cases.call, **case.options, implementation="reference"))(
        q, k, v, table, sequence, position, **arrays
    )
    q, position = (jnp.pad(x, [(0, 0), (0, 16)] + [(0, 0)] * (x.ndim - 2)) for x in (q, position + 1))
    cut = q.reshape(8, 12, *q.shape[2:]), k, v, table, jnp.zeros(8, jnp.int32), position.reshape(8, 12) - 1
    run = jax.jit(in_two_parts(case))
    got = np.asarray(run(*cut, **arrays)).reshape(q.shape)
    np.testing.assert_allclose(got[:, :80], want, atol=2e-6)
    assert (got[:, 80:] == 0).all()
    pages = f"{case.held}x{case.page}x{case.kv_heads * case.width}x"
    assert f"tensor<1x{pages}" in (text := run.lower(*cut, **arrays).as_text())
    assert f"tensor<8x{pages}" not in text


def test_cudnn_is_asked_for_the_same_two_parts(monkeypatch):
    """A function in place of cuDNN's takes the arguments: sums in bfloat16, log-sum-exps in float32."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    asked = []

    def by_xla(q, k, v, *, q_seqlen, kv_seqlen, scale, mask_type, return_residual):
        asked.append((mask_type, return_residual, q_seqlen.dtype, kv_seqlen.dtype, q.dtype, k.dtype))
        mixed, lse = jax_nn.by_xla(
            q, k, v, q_seqlen, kv_seqlen, scale, mask_type == cudnn.MaskType.PADDING_CAUSAL
        )
        return mixed.astype(q.dtype), jnp.swapaxes(lse, 1, 2)

    monkeypatch.setattr(cudnn, "dot_product_attention", by_xla)
    case = dataclasses.replace(cases.SMALL["long_chunk"], computed="bfloat16", stored="bfloat16")
    agree(case, functools.partial(jax_nn.paged_attention, **case.options, by=jax_nn.by_cudnn))
    kinds = cudnn.MaskType.PADDING_CAUSAL, cudnn.MaskType.PADDING
    assert asked == [(kind, True, *[jnp.int32] * 2, *[jnp.bfloat16] * 2) for kind in kinds]


@pytest.mark.parametrize("name, keys", [("lengths", 32), ("window", 64), ("chunk", 96)])
def test_xla_agrees_however_few_keys_a_turn_takes(name, keys, monkeypatch):
    monkeypatch.setattr(xla, "TURN_KEYS", keys)
    agree(cases.SMALL[name], by_xla(cases.SMALL[name]))


def many(*lengths: int) -> tuple[int, ...]:
    """So many blocks that a thread takes all heads of one."""
    return tuple(itertools.islice(itertools.cycle(lengths), 4 * (os.cpu_count() or 1)))


# In C++ other widths and groups of heads are loops of other lengths, of which the cases below have more.
NATIVE = {
    name: case for name, case in cases.SMALL.items() if name not in ("gqa1", "gqa4", "width96", "width128")
}
NATIVE |= {
    "half": cases.Case(lengths=(1, 40, 100), stored="float16"),
    "narrow": cases.Case(lengths=(1, 60), width=20, value=24, page=5, slots=12),
    "narrow_chunk": cases.Case(lengths=(33, 60), queries=7, width=20, heads=6, page=5, slots=12),
    "rows_left_over": cases.Case(lengths=(70, 200), queries=33, heads=5, kv_heads=1, page=64, width=48),
    "window_at_the_end": cases.Case(lengths=(300,), queries=70, window=9, page=64, slots=5),
    "float8_chunk": cases.Case(lengths=(40, 100), stored="float8_e4m3fn", queries=5, window=30, width=24),
    "bfloat16_rows": cases.Case(lengths=(40, 100), stored="bfloat16", queries=20),
    "one_query_of_many": cases.Case(lengths=(1, 100, 2, 40, 1), queries=5, window=64),
    "bfloat16_few": cases.Case(lengths=(1, 70, 100), stored="bfloat16", kv_heads=4),
    "together": cases.Case(lengths=many(0, 1, 300, 70, 130), slots=10, heads=8, kv_heads=4, width=48),
    "together_bfloat16": cases.Case(
        lengths=many(200, 64), slots=8, heads=6, window=90, width=96, stored="bfloat16"
    ),
    "together_half": cases.Case(lengths=many(70, 128), page=64, value=128, stored="float16"),
    "together_int8": cases.Case(lengths=many(100, 190), slots=6, kv_heads=4, stored="int8"),
    "together_float8": cases.Case(lengths=many(230, 9), page=20, slots=12, stored="float8_e4m3fn"),
    "together_chunk": cases.Case(lengths=many(70, 3), queries=5, heads=6, stored="bfloat16"),
}


@pytest.mark.slow("together_int8", "together_float8", "together_half", "together_bfloat16", "bfloat16_few")
@NEEDS_COMPILER
@pytest.mark.parametrize("name", NATIVE)
def test_native_agrees_with_the_definition(name):
    agree(NATIVE[name], by_native(NATIVE[name]))


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("narrow", ["x86-64", "haswell"], indirect=True)
def test_native_agrees_on_narrower_vectors(narrow, monkeypatch):
    monkeypatch.setattr(native_cpu, "TARGET", f"paged_attention_{narrow}")
    for name in (
        *("lengths", "gqa8", "long_chunk", "window", "wide_values", "latent_int8", "width80", "bfloat16"),
        *("int8_chunk", "float8", "half", "narrow_chunk", "rows_left_over", "together", "together_bfloat16"),
    ):
        agree(NATIVE[name], by_native(NATIVE[name]))


@NEEDS_COMPILER
def test_every_8_bit_float_is_read_as_it_is():
    """Denormals too, which XLA's threads flush: values of one key each, whose weight is 1."""
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(1, 256, 1, 1)
    v = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    k, ones = jnp.zeros((1, 256, 1, 1), v.dtype), jnp.ones((1, 256, 1, 1))
    table, q = jnp.arange(256, dtype=jnp.int32)[:, None], jnp.ones((256, 1, 1, 1))
    args = (q, (Pool(k, ones), Pool(v, ones)), table, jnp.arange(256), jnp.zeros((256, 1), jnp.int32))
    run = functools.partial(api.paged_attention, implementation="native_cpu")
    got = np.asarray(jax.jit(run)(*args)).ravel()
    np.testing.assert_array_equal(got, np.asarray(v).ravel().astype(np.float32))


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["long_chunk", "window_at_the_end", "together", "together_chunk"])
def test_native_results_do_not_depend_on_other_sequences(name):
    """Bit for bit: alone, and beside others; so no batch changes a greedy token."""
    case = NATIVE[name]
    (q, k, v, table, sequence, position), arrays = case.make()
    run = jax.jit(by_native(case))
    whole = np.asarray(run(q, k, v, table, sequence, position, **arrays))
    for b in range(len(case.lengths)):
        alone = run(q[b : b + 1], k, v, table, sequence[b : b + 1], position[b : b + 1], **arrays)
        np.testing.assert_array_equal(np.asarray(alone)[0], whole[b])


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "positions, stored", [((3, 70, -1, 150, 201), "float32"), ((66, -1, 100, -1, -1), "int8")]
)
def test_positions_may_leave_gaps(positions, stored):
    """A block's queries at any positions; what lies between and no query sees may hold anything."""
    case = cases.Case(lengths=(200,), queries=5, window=6, page=32, slots=8, stored=stored)
    (q, k, v, table, sequence, _), arrays = case.make()
    position = jnp.array([positions], jnp.int32)
    seen = np.asarray(visible(position, 256, 6))[0].any(0).reshape(8, 32)
    k, v = (np.array(80 * jax.random.normal(jax.random.key(i), x.shape)) for i, x in ((1, k), (2, v)))
    factors = np.full((2, *k.shape[:2], case.kv_heads, case.page), 1 / 80, np.float32)
    for slot, page in enumerate(np.asarray(table)[0]):
        k[:, page][:, ~seen[slot]] = v[:, page][:, ~seen[slot]] = np.nan
        factors[:, :, page, :, ~seen[slot]] = np.nan
    if case.scaled:
        arrays = dict(zip(arrays, map(jnp.array, factors), strict=True))
        k, v = (np.nan_to_num(x).round() for x in (k, v))
    else:
        k, v = k / 80, v / 80
    args = (q, *(jnp.array(x).astype(stored) for x in (k, v)), table, sequence, position)
    want, got = exact(case, args, arrays), np.asarray(jax.jit(by_native(case))(*args, **arrays))
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow(*SLOW)
@pytest.mark.parametrize("name", cases.SMALL)
def test_tpu_kernel_agrees_with_the_definition(name):
    agree(cases.SMALL[name], interpreted(cases.SMALL[name]))


@pytest.mark.parametrize(
    "by, name",
    [
        (by_xla, "chunk"),
        pytest.param(by_native, "chunk", marks=NEEDS_COMPILER),
        pytest.param(by_native, "lengths", marks=NEEDS_COMPILER),
        (interpreted, "lengths"),
    ],
)
def test_a_nan_in_one_sequence_reaches_no_other(by, name):
    """A value that is not a number, seen by the queries of one sequence, reaches no other sequence."""
    case = cases.SMALL[name]
    (q, k, v, table, sequence, position), arrays = case.make()
    spoilt = int(np.argmax(np.array(case.lengths)))
    v = v.at[case.options["row"], table[spoilt, 0], 0].set(jnp.nan)
    args = (q, k, v, table, sequence, position)
    got = np.asarray(jax.jit(by(case))(*args, **arrays), np.float64)
    want = exact(case, args, arrays)
    own = np.asarray(sequence) == spoilt
    assert np.isnan(want[own]).any() and np.isnan(got[own]).any()
    assert np.isfinite(want[~own]).all() and np.isfinite(got[~own]).all()


HOPPER = {
    "split": cases.Case(lengths=(0, 1, 65, 700), slots=12),  # in three shares
    "chunk_window": cases.Case(lengths=(70, 256), queries=2, window=50, heads=8),
    "cut": cases.Case(lengths=(0, 20, 100), queries=35, heads=4),  # 32 fit: two pieces, one query too many
    "page128": cases.Case(lengths=(1, 129, 600), page=128, value=128),
    "width80": cases.Case(lengths=(0, 65, 200), width=80, heads=6, kv_heads=3, queries=2),
    "width96": cases.Case(lengths=(70, 256), width=96, window=50, value=80),
    "width256": cases.Case(lengths=(1, 130), width=256, heads=8, kv_heads=1),
    "int8_width80": cases.Case(lengths=(1, 65, 200), width=80, stored="int8"),
    "int8": cases.Case(lengths=(0, 1, 65, 200), stored="int8"),
    "float8": cases.Case(lengths=(70, 256), queries=2, window=50, width=128, stored="float8_e4m3fn"),
    "float8_page128": cases.Case(lengths=(1, 600), page=128, width=128, stored="float8_e4m3fn"),
}


@pytest.mark.slow  # needs more threads than quick tests have: see conftest.py
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_kernel_agrees_with_the_definition(name):
    """All but the matmuls and the layouts in registers, which the interpreter does not know."""
    case = dataclasses.replace(HOPPER[name], computed="bfloat16")
    case = dataclasses.replace(case, page=max(case.page, 64), slots=max(case.slots, 5))
    case = dataclasses.replace(case, stored="bfloat16" if case.stored == "float32" else case.stored)
    args, arrays = case.shapes()
    assert not pallas_gpu.refuses(*args, **arrays, **case.options)
    agree(case, functools.partial(pallas_gpu.paged_attention, **case.options, interpret=InterpretGPUParams()))


@pytest.mark.slow
def test_hopper_kernel_takes_values_of_any_scale():
    """Also zeros, whose scale is 0, with queries near the end of float16's range."""
    case = cases.Case(lengths=(300,), page=64, width=128, stored="float8_e4m3fn", computed="bfloat16")
    (q, k, v, *where), arrays = case.make()
    q, arrays["k_scale"] = q * 2.0**14, arrays["k_scale"] * 2.0**-14
    shape = arrays["v_scale"].shape
    for power in (-12, 0, 8):
        scales = arrays["v_scale"] * 10.0 ** (power + jax.random.randint(jax.random.key(1), shape, -4, 4))
        scales = {"v_scale": jnp.where(jax.random.bernoulli(jax.random.key(2), 0.3, shape), 0, scales)}
        args, some = (q, k, v, *where), arrays | scales
        want = exact(case, args, some)
        run = functools.partial(pallas_gpu.paged_attention, **case.options, interpret=InterpretGPUParams())
        got = np.asarray(jax.jit(run)(*args, **some), np.float64)
        assert np.abs(got - want).max() <= case.tolerance * np.abs(want).max()


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ({}, 16),
        ({"width": 256}, 8),
        ({"stored": "int8"}, 12),
        ({"page": 128}, 8),
        ({"kv_heads": 32}, 64),
        ({"queries": 5}, 5),
    ],
)
def test_the_hopper_kernel_cuts_blocks_to_what_fits(change, most):
    case = dataclasses.replace(cases.REAL["llama_8b"], **({"queries": 128} | change))
    (q, k, v, *rest), arrays = case.shapes()
    assert not pallas_gpu.refuses(q, k, v, *rest, **arrays, **case.options)
    assert pallas_gpu.most_queries(q, k, v) == most


@pytest.mark.slow
def test_cache_attention_equals_the_kernels_reference():
    """A ragged batch of a chunk, a decode token and padding, cut into blocks by the cache itself."""
    keys = iter(jax.random.split(jax.random.key(0), 3))
    pools = tuple(Pool(jax.random.normal(next(keys), (2, 6, 16, 32))) for _ in range(2))
    table = jnp.array([[4, 1, 0], [5, 2, 3]], jnp.int32)
    config = sized(8, 64, 8, 2, 4, 2, 16)
    cache = Cache.create(config, KVPlan.standard(2), table, 6, 16, jnp.float32)
    cache = dataclasses.replace(cache, stores={"kv": pools})
    q = jax.random.normal(next(keys), (8, 4, 16))
    batch = make_batch(jnp.array([0, 5, 6]), jnp.array([17, 18, 19, 20, 21, 40, 0, 0]))
    want = cache.attend(1, {}, q, batch, window=20)[:6]
    got = api.paged_attention(
        q[batch.block_token],
        pools,
        table,
        batch.block_sequence,
        batch.block_position,
        row=1,
        window=20,
        implementation="reference",
    )
    np.testing.assert_allclose(got.reshape(-1, 4, 16)[batch.place][:6], want, atol=1e-5)
