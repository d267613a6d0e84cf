"""Calls as an engine makes them, and checks of an implementation's results: against the definition in
float32, with NaN in every row and page that no query sees, and with the same bits in two runs."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.causal_attention.api import causal_attention
from swiftkv_jax.kernels.common.pools import quantise
from swiftkv_jax.kernels.fused_kv_fill import cases as fill_cases
from swiftkv_jax.kernels.k_cache_attention import cases as k_cache_cases
from swiftkv_jax.kernels.page_write import cases as write_cases
from swiftkv_jax.kernels.page_write.api import page_write
from swiftkv_jax.kernels.paged_attention import cases as paged_cases

OFF = 2e-2  # largest difference between two right implementations, relative to the largest number
COLD = 4e8  # bytes read by consecutive calls before one reads the same again: more than a cache holds
_ROUND = 128  # tokens, a multiple of both usual page sizes, so that a pool's contents do not depend on them
_LEAST = 1e-30  # lower bound of the largest number, which may be zero
_SPARE = 3  # pages that belong to no sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Calls of `paged_attention` with the same numbers, however they are cut into pages and blocks.

    Attributes:
      sequences: (cached, new) tokens of each. block: queries of a block, 0 for all of a sequence.
      capacity: tokens of the page table. rows: of the pool. stored: their dtype. window: keys that a query
        sees, its own included; None: all.
      lanes: rows of the page table, most: blocks of queries, if there are more than the sequences need; the
        last ones are empty, as in a program of many rows.
    """

    sequences: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    width: int
    computed: str
    stored: str
    page: int
    block: int = 1
    capacity: int = 0
    rows: int = 2
    window: int | None = None
    lanes: int = 0
    most: int = 0

    @property
    def tokens(self) -> int:
        """The most new tokens of a sequence."""
        return max(new for _, new in self.sequences)

    @property
    def room(self) -> int:
        """Tokens that the pool holds of each sequence; further entries of a table name a spare page."""
        most, whole = max(sum(pair) for pair in self.sequences), math.lcm(_ROUND, self.page)
        return -(-most // whole) * whole

    @functools.cached_property
    def blocks(self) -> tuple[list[int], list[list[int]], list[list[int]]]:
        """(sequence [b], place [b, C] among its new tokens, position [b, C]: -1 is no query)."""
        size = min(self.block or self.tokens, self.tokens)
        sequence, place, position = [], [], []
        for number, (cached, new) in enumerate(self.sequences):
            for start in range(0, max(new, 1), size):
                at = range(start, start + size)
                sequence.append(number)
                place.append([min(i, self.tokens - 1) for i in at])
                position.append([cached + i if i < new else -1 for i in at])
        empty = self.most - len(sequence)
        sequence += [max(self.lanes, len(self.sequences)) - 1] * empty
        place += [[0] * size] * empty
        position += [[-1] * size] * empty
        return sequence, place, position

    @functools.partial(jax.jit, static_argnums=0)
    def make(self) -> tuple[tuple, dict]:
        """Arguments and array options; NaN in every row and page that no query sees."""
        keys = [jax.random.key(i, impl="rbg") for i in range(3)]  # "rbg" compiles quickly
        count, slots = len(self.sequences), self.room // self.page
        sequence, place, position = (jnp.array(x, jnp.int32) for x in self.blocks)
        q = jax.random.normal(keys[0], (count, self.tokens, self.heads, self.width), self.computed)
        pages = count * slots + _SPARE
        names = jax.random.permutation(keys[2], pages)
        table, spare = names[: count * slots].reshape(count, slots), names[-1]
        more = max(0, -(-self.capacity // self.page) - slots)
        cached, ends = jnp.array([(pair[0], sum(pair)) for pair in self.sequences]).T[..., None]
        seen = jnp.arange(self.room) < ends
        if self.window is not None:
            seen &= jnp.arange(self.room) > cached - self.window

        def paged_rows(rows):
            """[R, Q, S, n] in pages [R, P, Z, n]; int8 has no NaN, but its scales do."""
            fill = 127 if rows.dtype == jnp.int8 else jnp.nan
            rows = jnp.where(seen[..., None], rows, jnp.asarray(fill, rows.dtype))
            rows = rows.reshape(rows.shape[0], count, slots, self.page, -1)
            pool = jnp.full((rows.shape[0], pages, *rows.shape[3:]), fill, rows.dtype)
            return pool.at[:, table].set(rows)

        pools, scales = [], []
        shape = (self.rows, count, self.room, self.kv_heads, self.width)
        for drawn in jax.random.normal(keys[1], (2, *shape), self.computed):
            if jnp.dtype(self.stored).itemsize == 1:
                drawn, scale = quantise(drawn.astype(jnp.float32), jnp.dtype(self.stored))
                scales.append(jnp.swapaxes(paged_rows(scale), 2, 3))
            else:
                drawn = drawn.astype(self.stored)
            pools.append(paged_rows(drawn.reshape(*shape[:3], -1)))
        k_scale, v_scale = scales or (None, None)
        lanes = max(0, self.lanes - count)
        table = jnp.pad(table, ((0, lanes), (0, more)), constant_values=spare).astype(jnp.int32)
        args = (q[jnp.minimum(sequence, count - 1)[:, None], place], *pools, table, sequence, position)
        return args, {"k_scale": k_scale, "v_scale": v_scale}

    def call(self, implementation: str) -> Callable:
        """The operation, as a function of the arguments that `make` returns and a `row`."""
        return functools.partial(paged_cases.call, window=self.window, implementation=implementation)

    @property
    def bytes(self) -> float:
        """Keys and values read once, for the new tokens of each sequence together."""
        stored = jnp.dtype(self.stored).itemsize
        token = self.kv_heads * (2 * self.width * stored + (8 if stored == 1 else 0))
        far = self.window or math.inf
        return float(token * sum(min(cached, far) + new for cached, new in self.sequences))

    @property
    def flops(self) -> float:
        """FLOPs of scores and sums, without a window."""
        pairs = sum(new * cached + new * (new + 1) / 2 for cached, new in self.sequences)
        return 4 * pairs * self.heads * self.width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A packed row and a whole one, as training reads them; `window` as of `Attention`."""

    tokens: int
    heads: int
    kv_heads: int
    width: int
    computed: str
    window: int | None = None

    @functools.partial(jax.jit, static_argnums=0)
    def make(self) -> tuple[jax.Array, ...]:
        """q, k, v, the gradient of the sums, and segments of one token, of 128 tokens and of one more."""
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        arrays = (
            jax.random.normal(key, (2, self.tokens, n, self.width), self.computed)
            for key, n in zip(keys, heads, strict=True)
        )
        ends = jnp.array([1, 129, 258])
        packed = (jnp.arange(self.tokens)[:, None] >= ends).sum(1)
        return *arrays, jnp.stack([packed, jnp.zeros_like(packed)]).astype(jnp.int32)

    def call(self, implementation: str) -> Callable:
        """A function from the arrays of `make` to (sums, the gradients of q, k and v)."""
        window = self.tokens if self.window is None else self.window

        def run(q, k, v, slope, segments):
            attend = functools.partial(causal_attention, implementation=implementation)
            out, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments, window), q, k, v)
            return out, *back(slope)

        return run


def training_verdict(case: Training, implementation: str) -> dict:
    """`right`, if not `why`, and the `error` of sums and gradients; gradients may be off by `OFF`."""
    arrays, run = case.make(), jax.jit(case.call(implementation))
    got, again = run(*arrays), run(*arrays)
    *numbers, segments = arrays
    want = jax.jit(case.call("reference"))(*(x.astype(jnp.float32) for x in numbers), segments)
    allowed = (_tolerance(paged_cases, case.computed), *[OFF] * 3)
    names = ("sums", "gradient of q", "gradient of k", "gradient of v")
    said = [verdict(*of) for of in zip(got, again, want, allowed, strict=True)]
    why = [f"{name}: {one['why']}" for name, one in zip(names, said, strict=True) if one["why"]]
    errors = [one["error"] for one in said]
    error = None if None in errors else max(errors)
    return {"right": not why, "why": "; ".join(why), "error": error}


def attention_verdict(case: Attention, implementation: str) -> dict:
    """`right`, if not `why`, and the `error` of paged attention."""
    args, arrays = case.make()
    run = jax.jit(functools.partial(case.call(implementation), row=1))
    got, again = run(*args, **arrays), run(*args, **arrays)
    return verdict(got, again, _defined(case), _tolerance(paged_cases, case.computed))


@functools.cache  # the same for every implementation
def _defined(case: Attention) -> jax.Array:
    args, arrays = case.make()
    exact = jax.jit(functools.partial(case.call("reference"), row=1))
    return exact(args[0].astype(jnp.float32), *args[1:], **arrays)


def keys_verdict(case: k_cache_cases.Case, implementation: str) -> dict:
    """The same for attention that reads keys alone, or inputs."""
    args, arrays = case.make()
    run, exact = (
        jax.jit(functools.partial(case.door, **case.options, implementation=name))
        for name in (implementation, "reference")
    )
    got, again = run(*args, **arrays), run(*args, **arrays)
    want = exact(args[0].astype(jnp.float32), *args[1:], **arrays)
    return verdict(got, again, want, _tolerance(k_cache_cases, case.computed))


def fill_verdict(case: fill_cases.Case, implementation: str) -> dict:
    """The same for the fused fill; pages that are not to be written must be unchanged."""

    def filled(name: str) -> tuple[jax.Array, jax.Array]:
        """(Rows of the pages named, contents of all others), keys and values together."""
        call = functools.partial(fill_cases.call, **case.options, implementation=name)
        *_, before, names, _ = case.make()
        named = jnp.zeros(case.pages, bool).at[names].set(True, mode="drop")
        after = jax.jit(call, donate_argnums=4)(*case.make())
        rows = jnp.stack([_widened(*pair) for pair in ((after.k, after.k_scale), (after.v, after.v_scale))])
        kept = [
            jnp.array_equal(_bits(one)[:, ~named], _bits(other)[:, ~named])
            for one, other in zip(after, before, strict=True)
            if one is not None
        ]
        return rows[:, jnp.array(case.rows)][:, :, named], jnp.stack(kept).all()

    (got, kept), (again, _), (want, _) = map(filled, (implementation, implementation, "reference"))
    said = verdict(
        got, again, want, max(fill_cases.TOLERANCE[case.stored], _tolerance(fill_cases, case.computed))
    )
    why = "; ".join([*filter(None, [said["why"]]), "pages not named were written"])
    return said if kept else said | {"right": False, "why": why}


def write_verdict(case: write_cases.Case, implementation: str) -> dict:
    """The same for writing tokens into pages; all other places must be unchanged, any NaN included."""
    write = functools.partial(page_write, **case.options, implementation=implementation)
    run = jax.jit(write, donate_argnums=0)
    rows = jnp.array(case.rows)[:, None]

    def written() -> tuple[jax.Array, jax.Array]:
        """(Rows of the tokens [F, T, E] in float32, whether all else is as it was.)"""
        before, _, page, slot = case.make()
        after = run(*case.make())
        put = jnp.zeros((case.of, case.pages, case.page), bool).at[rows, page, slot].set(True)
        put = put.at[:, 0].set(True)[..., None]  # scratch, whatever is there
        kept = jnp.all(put | _alike(before.data, after.data))
        if before.scale is not None and after.scale is not None:
            kept &= jnp.all(jnp.swapaxes(put, 2, 3) | _alike(before.scale, after.scale))
        return jnp.where(page[:, None] > 0, _widened(*after)[rows, page, slot], 0), kept

    _, new, page, _ = case.make()
    want = jnp.where(page[:, None] > 0, jnp.swapaxes(new, 0, 1).reshape(len(case.rows), case.tokens, -1), 0)
    (got, kept), (again, _) = written(), written()
    said = verdict(got, again, want, fill_cases.TOLERANCE[_rounding(case)])
    why = "; ".join([*filter(None, [said["why"]]), "places of no token were written"])
    return said if kept else said | {"right": False, "why": why}


def _alike(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether elements have the same bits, or are both NaN: conversions of a pool do not keep a NaN's
    bits."""
    return (_bits(a) == _bits(b)) | (jnp.isnan(a.astype(jnp.float32)) & jnp.isnan(b.astype(jnp.float32)))


def _rounding(case: write_cases.Case) -> str:
    """The dtype whose rounding is allowed."""
    return "bfloat16" if case.stored == "float16" else case.stored


def _widened(rows: jax.Array, scale: jax.Array | None) -> jax.Array:
    """[R, P, Z, E] in float32; 8-bit rows are multiplied by their scales."""
    wide = rows.astype(jnp.float32)
    if scale is None:
        return wide
    heads = wide.reshape(*wide.shape[:3], scale.shape[2], -1)
    return (heads * jnp.swapaxes(scale, 2, 3)[..., None]).reshape(wide.shape)


def _tolerance(cases, computed: str) -> float:
    """Tolerance by the dtype of the computation. Only CPUs multiply in full float32 by default."""
    known = cases.TOLERANCE
    return known.get(computed if jax.default_backend() == "cpu" else "bfloat16", known["bfloat16"])


@jax.jit
def _compared(got, again, want) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(Distance, largest number, numbers that are not finite, whether two runs have the same bits.)"""
    wide, exact = got.astype(jnp.float32), want.astype(jnp.float32)
    same = jnp.array_equal(_bits(got), _bits(again))
    return jnp.abs(wide - exact).max(), jnp.abs(exact).max(), (~jnp.isfinite(wide)).sum(), same


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def verdict(got: jax.Array, again: jax.Array, want: jax.Array, tolerance: float) -> dict:
    """`right`; `why` not; the `error` relative to the largest number, or None."""
    far, top, strange, same = (x.item() for x in _compared(got, again, want))
    error, faults = far / max(top, _LEAST), []
    if strange:
        faults.append(f"{strange} of {got.size} numbers are not finite")
    elif not error <= tolerance:
        faults.append(f"off by {error:.2g} of the largest number; {tolerance:.2g} is allowed")
    if not same:
        faults.append("two runs differ")
    return {"right": not faults, "why": "; ".join(faults), "error": error if math.isfinite(error) else None}


def distance(got: jax.Array, want: jax.Array) -> float:
    """Largest difference relative to the largest number; infinite if a number is not finite."""
    far, top, *_ = (x.item() for x in _compared(got, got, want))
    return far / max(top, _LEAST) if math.isfinite(far) else math.inf


def in_a_row(call: Callable, rows: int) -> Callable:
    """Calls one after the other on each row of a pool, as one program that returns the first and the last
    result. The queries of each call are the result of the one before, so that none can be optimised away."""

    @jax.jit
    def run(q, *rest, **arrays):
        out = [q]
        for row in range(rows):
            out.append(call(out[-1], *rest, row=row, **arrays))
        return out[1], out[-1]

    return run
