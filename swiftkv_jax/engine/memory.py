"""What the engine's programs take of a device's memory beside weights and pools, as the compiler says."""

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Mesh

from swiftkv_jax.cache import Cache
from swiftkv_jax.engine.engine import make_runner
from swiftkv_jax.engine.settings import Settings
from swiftkv_jax.model import Transformer
from swiftkv_jax.predict import Predicted
from swiftkv_jax.shapes import PyTree


def working_bytes(
    model: Transformer | Predicted, params: PyTree, mesh: Mesh | None, settings: Settings
) -> int:
    """Bytes on each device that the largest program takes for intermediate and returned arrays.

    It is compiled for this, and not run. `params` are arrays, or their shapes with shardings. Any
    `settings.num_pages` will do: pools are updated in place.
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    runner = make_runner(model, params, mesh, settings, _described)
    return max(taken(call) for call in runner.largest())


def taken(call: partial) -> int:
    """Bytes of what a program makes: its intermediate arrays, and its results but for donated arguments."""
    memory = call.func.lower(*call.args, **call.keywords).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _described(params: PyTree, make: Callable[[], Cache]) -> Cache:
    """The shapes of what `make` makes, where `engine.new_cache` would put it."""
    cache = jax.eval_shape(make)
    alone = jax.tree.leaves(params)[0].sharding
    places = jax.tree.map(lambda _: alone, cache) if cache.mesh is None else cache.shardings
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), cache, places)
