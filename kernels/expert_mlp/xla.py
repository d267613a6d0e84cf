"""Expert MLPs in jax.numpy: tiles of one expert's tokens, one after the other; or one grouped product.

Both sort the assignments (a token and one of its experts) by expert. No expert has a capacity.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from swiftkv_jax.kernels.common.dispatch import static_loops

_TILES = 16, 512  # tokens of the smallest and of the largest tile
_WASTE = 6  # times as many assignments as rows of tiles that may be empty
FEW = 64  # tokens up to which a GPU takes less time to read all experts than to launch a tile for each
_BLOCK = 2048  # tokens of one grouped product, whose rows exist at once


def expert_mlp(x, chosen, weights, gate, up, down, *scales, activation):
    """As `api.expert_mlp` of tokens [T, D]; an expert from X on is none."""
    arrays = (x, chosen, weights, gate, up, down, *scales)
    if static_loops(None) and len(x) <= FEW and 2 * chosen.size >= len(gate):
        return _every(*arrays, activation=activation)
    return _tiled(activation, *arrays)


def _one(activation, x, gate, up, down, *scales):
    """One expert's output [n, D] in float32."""
    wide = partial(jnp.matmul, preferred_element_type=jnp.float32)
    if not scales:
        return wide(activation(jnp.matmul(x, gate)) * jnp.matmul(x, up), down)
    gate, up, down = (w.astype(x.dtype) for w in (gate, up, down))
    gate, up = (wide(x, w) * scale for w, scale in zip((gate, up), scales[:2], strict=True))
    hidden = activation(gate.astype(x.dtype)) * up.astype(x.dtype)
    return wide(hidden, down) * scales[2]


def _every(x, chosen, weights, gate, *rest, activation):
    """Every expert on every token: the experts are read once, where they lie."""
    share = jnp.sum(jax.nn.one_hot(chosen, len(gate)) * weights[..., None], axis=1)
    each = jax.vmap(partial(_one, activation))(jnp.broadcast_to(x, (len(gate), *x.shape)), gate, *rest)
    return jnp.einsum("xtd,tx->td", each, share, precision="highest").astype(x.dtype)


def tile_of(assignments: int, experts: int) -> int:
    """Tokens of a tile: a power of two, small enough that few rows of all tiles are empty."""
    most = max(1, assignments // (_WASTE * experts))
    return min(max(_TILES[0], 1 << (most.bit_length() - 1)), _TILES[1])


def most_tiles(assignments: int, experts: int, tile: int) -> int:
    """Tiles that any choice of experts needs at most."""
    begun = min(assignments, experts)
    return begun + (assignments - begun) // tile


def _tiles(chosen, experts: int):
    """(number of tiles, the expert of each [n], its assignments [n, tile]; chosen.size is none)."""
    flat = chosen.reshape(-1)
    tile = tile_of(flat.size, experts)
    order = jnp.argsort(flat, stable=True)
    count = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    each = -(-count // tile)
    ends = jnp.cumsum(each)
    index = jnp.arange(most_tiles(flat.size, experts, tile))
    expert = jnp.minimum(jnp.searchsorted(ends, index, side="right"), experts - 1)
    inside = (index - ends[expert] + each[expert])[:, None] * tile + jnp.arange(tile)
    first = (jnp.cumsum(count) - count)[expert]
    live = (index[:, None] < ends[-1]) & (inside < count[expert][:, None])
    place = order.at[first[:, None] + inside].get(mode="clip")
    number = len(index) if static_loops(None) else ends[-1]
    return number, expert, jnp.where(live, place, flat.size)


def _rows(x, index):
    """x[index], and zeros for an index of no row."""
    return x.at[index].get(mode="fill", fill_value=0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(activation, x, chosen, weights, *experts):
    number, expert, assigned = _tiles(chosen, len(experts[0]))
    per_token = chosen.shape[-1]

    def tile(i, out):
        a, e = assigned[i], expert[i]
        y = _one(activation, _rows(x, a // per_token), *(w[e] for w in experts))
        share = _rows(weights.reshape(-1), a)[:, None]
        return out.at[a // per_token].add(share * y, mode="drop")

    # Zeros that depend on the tokens: XLA would make those of all layers at once, before the first.
    zeros = jnp.where(jnp.abs(x) < -1, x, 0).astype(jnp.float32)
    return lax.fori_loop(0, number, tile, zeros).astype(x.dtype)


def _forward(activation, *arrays):
    return _tiled(activation, *arrays), arrays


def backward(activation, arrays, slope):
    """The same loop again. XLA removes the sums of the experts' gradients where nothing needs them; those in
    8 bits have none."""
    x, chosen, weights, *experts = arrays
    trained = experts if len(experts) == 3 else []
    number, expert, assigned = _tiles(chosen, len(experts[0]))
    per_token = chosen.shape[-1]

    def tile(i, sums):
        a, e = assigned[i], expert[i]
        dx, shares, *of_experts = sums
        own = [w[e] for w in experts]
        run = partial(_one, activation) if trained else lambda rows: _one(activation, rows, *own)
        y, pull = jax.vjp(run, _rows(x, a // per_token), *(own if trained else ()))
        wanted = _rows(slope, a // per_token).astype(jnp.float32)
        rows, *slopes = pull(_rows(weights.reshape(-1), a)[:, None] * wanted)
        dx = dx.at[a // per_token].add(rows.astype(jnp.float32), mode="drop")
        shares = shares.at[a].set(jnp.sum(y * wanted, axis=-1), mode="drop")
        pairs = zip(of_experts, slopes, strict=True)
        return dx, shares, *(total.at[e].add(w.astype(jnp.float32)) for total, w in pairs)

    zeros = [jnp.zeros(y.shape, jnp.float32) for y in (x, weights.reshape(-1), *trained)]
    dx, shares, *of_experts = lax.fori_loop(0, number, tile, tuple(zeros))
    found = (dx, shares.reshape(weights.shape), *of_experts)
    dx, shares, *of_experts = (y.astype(z.dtype) for y, z in zip(found, (x, weights, *trained), strict=True))
    return dx, None, shares, *(of_experts or [None] * len(experts))


_tiled.defvjp(_forward, backward)


def ragged(rows, experts, count):
    precision = None if rows.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.ragged_dot(rows, experts, count, precision=precision)


def by_groups(x, chosen, weights, gate, up, down, *, activation, product=ragged):
    """The same by a `product` of rows sorted by expert: `lax.ragged_dot` is one operation of a TPU. Elsewhere
    XLA multiplies all rows by all experts."""

    @partial(jax.checkpoint, prevent_cse=False)
    def some(block):
        x, chosen, weights = block
        flat, per_token = chosen.reshape(-1), chosen.shape[-1]
        order = jnp.argsort(flat, stable=True)
        count = jnp.zeros(len(gate), jnp.int32).at[flat].add(1, mode="drop")
        own = (jnp.arange(flat.size) < jnp.sum(count))[:, None]
        rows = jnp.where(own, x[order // per_token], 0)  # behind the groups anything may come out
        hidden = activation(product(rows, gate, count)) * product(rows, up, count)
        y = jnp.where(own, product(hidden, down, count), 0)[jnp.argsort(order)].reshape(*chosen.shape, -1)
        return jnp.einsum("tkd,tk->td", y, weights, precision="highest").astype(x.dtype)

    blocks = -(-len(x) // _BLOCK)
    if blocks == 1:
        return some((x, chosen, weights))
    more = blocks * _BLOCK - len(x)
    padded = [
        jnp.pad(y, ((0, more), (0, 0)), constant_values=v)
        for y, v in ((x, 0), (chosen, len(gate)), (weights, 0))
    ]
    cut = [y.reshape(blocks, _BLOCK, -1) for y in padded]
    return lax.map(some, tuple(cut)).reshape(-1, x.shape[-1])[: len(x)]


def refuses_groups(*args, **_) -> str:
    """Name the unsupported part of a call and what is supported instead, or return ""."""
    return "experts in 8 bits, which would be made wide together: xla does" if len(args) > 6 else ""
