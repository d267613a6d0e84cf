"""Device memory that the engine's programs take beside weights and pools, as reported by the compiler."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.engine.engine import make_runner
from swiftkv_jax.engine.settings import Settings


def working_bytes(
    model: Transformer | Predicted, params: PyTree, mesh: Mesh | None, settings: Settings
) -> int:
    """Bytes on each device that the largest program takes for intermediate and returned arrays.

    The program is compiled for this, and not run. `params` are arrays, or their shapes with shardings. Any
    `settings.num_pages` will do: pools are updated in place.
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    runner = make_runner(model, params, mesh, settings, described)
    return max(taken(call) for call in runner.largest())


def taken(call: partial) -> int:
    """Bytes that a program allocates: its intermediate arrays, and its results except donated arguments."""
    return allocated(call.func.lower(*call.args, **call.keywords).compile())


def allocated(compiled: Any) -> int:
    """As `taken`, of a compiled program."""
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def described(params: PyTree, make: Callable[[], Cache]) -> Cache:
    """The shapes of the cache that `make` returns, with the placement of `engine.new_cache`."""
    cache = jax.eval_shape(make)
    alone = jax.tree.leaves(params)[0].sharding
    places = jax.tree.map(lambda _: alone, cache) if cache.mesh is None else cache.shardings
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), cache, places)
