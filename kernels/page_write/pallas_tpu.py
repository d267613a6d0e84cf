"""Write tokens into pages on TPU (Mosaic TPU): each touched page once, with many copies in flight.

A page is [Z, E] in tiles of G rows (8 of 32 bits, 16 of 16 bits, 32 of 8 bits), the least that a DMA moves.
A run of tokens that fills its page is written as one page. Of a shorter run only the touched tiles are
written, and partially filled ones are read before: a decoded token costs one tile each way. Rows are moved as
32-bit words, whatever their dtype, so that the other rows stay bit for bit the same.
"""

from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from swiftkv_jax.kernels.common import chips
from swiftkv_jax.kernels.common.pools import Pool, encode

_LANES, _WORDS = 128, 8  # of a tile of 32-bit words
_MOST = 64  # runs in flight


# Static parameters of the kernel: tokens of a page, rows of a tile, places for runs in flight.
_Form = namedtuple("_Form", "page tile slots")


# Tokens that are neighbours in the batch and in a page; int32, for the scalar core. first, last: [T] the
# tokens of each run, both included; T where there is no run. some: [2] the number of runs, and whether no two
# are in one page. page, slot: [T] of each token. rows: [F].
Runs = namedtuple("Runs", "first last some page slot rows")


# stage [slots, Z, E] pages; fresh [slots, Z + 3 G, E] rows of the batch, from row G on; factors [slots, K, Z]
# and new ones [slots, K, Z + 128] of 8-bit rows; semaphores [slots].
_Scratch = namedtuple("_Scratch", "stage fresh factors new_factors arrived left")


# One run: its place in the ring, page, first slot in it, tokens, and first token of the batch.
_Run = namedtuple("_Run", "place page slot count token")


def runs_of(page: jax.Array, slot: jax.Array, rows: tuple[int, ...], pages: int) -> Runs:
    """The runs of tokens at (page, slot), both [T]; of tokens outside pages [1, `pages`) there is none."""
    page, slot = page.astype(jnp.int32), slot.astype(jnp.int32)
    count = page.shape[0]
    token, live = jnp.arange(count, dtype=jnp.int32), (page > 0) & (page < pages)
    goes_on = live[1:] & (page[1:] == page[:-1]) & (slot[1:] == slot[:-1] + 1)
    opens, closes = live & ~jnp.pad(goes_on, (1, 0)), live & ~jnp.pad(goes_on, (0, 1))
    edges = [jnp.where(opens, token, count), jnp.where(closes, token, count)]
    named = jnp.where(opens, page, pages + token)
    first, last, named = lax.sort(jnp.stack([*edges, named]), dimension=1)
    apart = jnp.all(named[1:] != named[:-1])
    some = jnp.stack([jnp.sum(opens), apart]).astype(jnp.int32)
    return Runs(first, last, some, page, slot, jnp.array(rows, jnp.int32))


def _kernel(form: _Form, s: Runs, arrays, pool, scratch: _Scratch):
    (new, new_scale), (data, scale), filled = arrays, pool, pl.program_id(0)
    row, runs = s.rows[filled], s.some[0]
    # Two runs in one page may touch the same tile; then each waits for the one before.
    apart = s.some[1] == 1
    ahead = jnp.where(apart, form.slots // 2, 0)
    tile = form.tile

    def run(i) -> _Run:
        token = s.first[i]
        return _Run(lax.rem(i, form.slots), s.page[token], s.slot[token], s.last[i] - token + 1, token)

    def tiles(r: _Run):
        return r.slot // tile, (r.slot + r.count - 1) // tile + 1

    def each(begin, end, body) -> None:
        lax.fori_loop(begin, end, lambda i, carry: (body(i), carry)[1], 0)

    def rows_of(index, count: int = 1):
        return pl.ds(pl.multiple_of(index * tile, tile), count * tile)

    def reads(r: _Run, act) -> None:
        """Act on the copies of a run's inputs: the batch's rows, and the page's partially written tiles."""

        def copy(source, target):
            act(pltpu.make_async_copy(source, target, scratch.arrived.at[r.place]))

        whole, begin, last = r.count == form.page, r.token // tile, r.token + r.count - 1

        def bring(i, count: int = 1):
            copy(new.at[filled, rows_of(begin + i, count)], scratch.fresh.at[r.place, rows_of(1 + i, count)])

        def edge(i):
            full = (r.slot <= i * tile) & ((i + 1) * tile <= r.slot + r.count)

            @pl.when(jnp.logical_not(full))
            def _():
                copy(data.at[row, r.page, rows_of(i)], scratch.stage.at[r.place, rows_of(i)])

        in_page = form.page // tile
        if new.shape[1] >= form.page:
            pl.when(whole)(lambda: bring(0, in_page))
        each(jnp.where(whole, in_page, 0), last // tile + 1 - begin, bring)

        @pl.when(jnp.logical_not(whole))
        def _():
            each(*tiles(r), edge)

        if scale is not None:
            begin = r.token // _LANES

            def bring_factors(i):
                lanes = (pl.ds(pl.multiple_of(x * _LANES, _LANES), _LANES) for x in (begin + i, i))
                source, target = lanes
                copy(new_scale.at[filled, :, source], scratch.new_factors.at[r.place, :, target])

            each(0, last // _LANES + 1 - begin, bring_factors)

            @pl.when(jnp.logical_not(whole))
            def _():
                copy(scale.at[row, r.page], scratch.factors.at[r.place])

    def merge(r: _Run) -> None:
        packed = tile // _WORDS  # rows in a 32-bit word
        bits = 32 // packed
        end = r.slot + r.count
        place = lax.broadcasted_iota(jnp.int32, (_WORDS, scratch.stage.shape[-1]), 0) * packed

        def one(i):
            # The row of `fresh` for the tile's first row; it begins `odd` rows into a word.
            start = i * tile - r.slot + lax.rem(r.token, tile) + tile
            odd, turn = lax.rem(start, packed), lax.rem(start, tile) // packed
            words = pltpu.bitcast(scratch.fresh[r.place, rows_of(start // tile, 2), :], jnp.int32)
            got = pltpu.roll(words, 2 * _WORDS - turn, 0)[:_WORDS]
            if packed > 1:
                after = pltpu.roll(words, 2 * _WORDS - turn - 1, 0)[:_WORDS]
                low = lax.shift_right_logical(got, jnp.full_like(got, odd * bits))
                high = lax.shift_left(after, jnp.full_like(got, 31 - odd * bits))
                got = low | lax.shift_left(high, jnp.full_like(got, 1))  # a shift by 32 is undefined
            mask = jnp.zeros_like(got)
            for k in range(packed):
                here = i * tile + place + k
                own = ((1 << bits) - 1) << (k * bits)
                own = jnp.int32(own - (1 << 32) if own >= 1 << 31 else own)
                mask |= jnp.where((here >= r.slot) & (here < end), own, 0)
            old = pltpu.bitcast(scratch.stage[r.place, rows_of(i), :], jnp.int32)
            both = (got & mask) | (old & ~mask)
            scratch.stage[r.place, rows_of(i), :] = pltpu.bitcast(both, scratch.stage.dtype)

        each(*tiles(r), one)
        if scale is not None:
            width = form.page + _LANES
            turn = lax.rem(r.slot - lax.rem(r.token, _LANES) + width, width)
            got = pltpu.roll(scratch.new_factors[r.place], turn, 1)[:, : form.page]
            here = lax.broadcasted_iota(jnp.int32, got.shape, 1)
            inside = (here >= r.slot) & (here < end)
            scratch.factors[r.place] = jnp.where(inside, got, scratch.factors[r.place])

    def writes(r: _Run, act) -> None:
        def copy(source, target):
            act(pltpu.make_async_copy(source, target, scratch.left.at[r.place]))

        whole = r.count == form.page

        @pl.when(whole)
        def _():
            copy(scratch.stage.at[r.place], data.at[row, r.page])

        @pl.when(jnp.logical_not(whole))
        def _():
            def put(i):
                copy(scratch.stage.at[r.place, rows_of(i)], data.at[row, r.page, rows_of(i)])

            each(*tiles(r), put)

        if scale is not None:
            copy(scratch.factors.at[r.place], scale.at[row, r.page])

    start, wait = (lambda copy: copy.start()), (lambda copy: copy.wait())

    def turn(i):
        """Read run i + ahead; write run i."""
        coming = i + ahead

        @pl.when(apart & (coming >= form.slots) & (coming < runs))
        def _():
            writes(run(coming - form.slots), wait)

        @pl.when(coming < runs)
        def _():
            reads(run(coming), start)

        here = run(i)
        reads(here, wait)
        merge(here)
        writes(here, start)

        @pl.when(jnp.logical_not(apart))
        def _():
            writes(here, wait)

    each(0, jnp.minimum(ahead, runs), lambda i: reads(run(i), start))
    each(0, runs, turn)
    each(jnp.where(apart, jnp.maximum(runs - form.slots, 0), runs), runs, lambda i: writes(run(i), wait))


def _slot_bytes(pool: Pool) -> int:
    """VMEM that one run takes."""
    page, width = pool.data.shape[2:]
    lanes, itemsize = -(-width // _LANES) * _LANES, pool.data.dtype.itemsize
    rows = (2 * page + 3 * 32 // itemsize) * lanes * itemsize
    heads = 0 if pool.scale is None else -(-pool.scale.shape[2] // _WORDS) * _WORDS
    return rows + 4 * heads * (2 * page + _LANES)


def page_write(pool: Pool, new, page, slot, *, rows: tuple[int, ...], interpret: Any = False) -> Pool:
    """As `api.page_write`, in place."""
    (data, scale), (tokens, filled) = pool, new.shape[:2]
    slots = min(_MOST, chips.current().vmem_limit // 2 // _slot_bytes(pool))  # that half the VMEM holds
    form = _Form(data.shape[2], 32 // data.dtype.itemsize, slots)
    stored, factor = encode(new, data.dtype)
    stored = jnp.moveaxis(stored.reshape(tokens, filled, -1), 0, 1)
    arrays = Pool(jnp.pad(stored, ((0, 0), (0, -tokens % form.tile), (0, 0))))
    if factor is not None:
        factor = jnp.moveaxis(factor, 0, 2)
        arrays = arrays._replace(scale=jnp.pad(factor, ((0, 0), (0, 0), (0, -tokens % _LANES))))
    runs = runs_of(page, slot, rows, data.shape[1])

    def room(like, *size: int):
        return None if like is None else pltpu.VMEM((slots, *size), like.dtype)

    heads = 0 if scale is None else scale.shape[2]
    scratch = _Scratch(
        stage=room(data, form.page, data.shape[3]),
        fresh=room(data, form.page + 3 * form.tile, data.shape[3]),
        factors=room(scale, heads, form.page),
        new_factors=room(scale, heads, form.page + _LANES),
        arrived=pltpu.SemaphoreType.DMA((slots,)),
        left=pltpu.SemaphoreType.DMA((slots,)),
    )
    hbm = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), pool)
    before = len(jax.tree.leaves((runs, arrays)))
    return pl.pallas_call(
        lambda s, new, _, data, scale, own: _kernel(form, s, new, Pool(data, scale), _Scratch(*own)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(filled,),
            in_specs=[hbm, hbm],
            out_specs=hbm,
            scratch_shapes=[tuple(scratch)],
        ),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pool),
        input_output_aliases={before + i: i for i in range(len(jax.tree.leaves(pool)))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=chips.current().vmem_limit
        ),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=2 * stored.nbytes, transcendentals=0),
        interpret=interpret,
        name="page_write",
    )(runs, arrays, pool)


def refuses(pool: Pool, new, *_, **__) -> str:
    """Name the unsupported part of a call and what is supported instead, or return ""."""
    page, dtype = pool.data.shape[2], pool.data.dtype
    if dtype == jnp.float16 or dtype.itemsize > 4:
        return f"{dtype} rows: bfloat16, float32, int8, float8_e4m3fn"
    tile = 32 // dtype.itemsize if pool.scale is None else _LANES
    if page % tile:
        return f"a page of {page} tokens of {dtype}: a multiple of {tile}"
    if pool.data.shape[3] % _LANES:
        return f"rows {pool.data.shape[3]} wide: a multiple of {_LANES}"
    if (need := 16 * new.shape[0]) > (most := chips.current().smem):
        return f"{new.shape[0]} tokens, for {need} bytes of scalar memory: at most {most}"
    if (need := 2 * _slot_bytes(pool)) > (most := chips.current().vmem_limit // 2):
        return f"pages of {page} rows {pool.data.shape[3]} wide, for {need} bytes of VMEM: at most {most}"
    return ""
