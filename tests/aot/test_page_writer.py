"""The writer of pages at its real shapes, by the compiler of each TPU generation: the pool is updated where
it lies, and nothing of its size is made."""

import functools
import math
import re

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernel_targets import TPUS, mesh_of, size

from swiftkv_jax.kernels.page_write import cases
from swiftkv_jax.kernels.page_write.api import page_write

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]


def compiled(chip: str, case: cases.Case, donate: bool = True, **options):
    """The call, compiled: by XLA, or as `options` name it."""
    mesh = mesh_of(TPUS[chip])
    place = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), case.shapes()[0])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        write = functools.partial(page_write, **case.options, **options)
        return jax.jit(write, donate_argnums=(0,) if donate else ()).lower(*args).compile()


def made(hlo: str, least: int) -> list[str]:
    """Operations of a program that give an array of at least so many numbers, but parameters and views."""
    found = []
    for kind, name in re.findall(r"^ *(?:ROOT )?%\S+ = (.*?[)}\]]) ([a-z][\w\-]*)\(", hlo, re.M):
        shapes = re.findall(r"\w+\[([\d,]*)\]", kind)
        most = max((math.prod(map(int, filter(None, dims.split(",")))) for dims in shapes), default=0)
        if most >= least and name not in ("parameter", "bitcast", "get-tuple-element", "tuple"):
            found.append(name)
    return found


@pytest.mark.parametrize("name", cases.REAL)
@pytest.mark.parametrize("chip", TPUS)
def test_the_pool_is_updated_where_it_lies(chip, name):
    case = cases.REAL[name]
    pool, new, *_ = case.shapes()[0]
    program = compiled(chip, case, implementation="pallas_tpu")
    memory, hlo = program.memory_analysis(), program.as_text()
    assert memory.alias_size_in_bytes == size(pool)
    assert made(hlo, pool.data.size) == ["custom-call"] and 'custom_call_target="tpu_custom_call"' in hlo
    assert not re.search(r" (while|scatter)\(", hlo)
    # Temporary memory: the rounded tokens in the order of rows, and a few numbers for each token.
    token = 2 * new.size // new.shape[0] * max(new.dtype.itemsize, pool.data.dtype.itemsize)
    assert memory.temp_size_in_bytes <= case.tokens * (token + 512) + (1 << 18)
    moved = program.cost_analysis()["bytes accessed"]
    assert moved <= 12 * new.size * 4 + (1 << 20)
