"""Every kernel x real shape x TPU generation, by the real compiler: it fits, and no pool is copied."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec
from kernel_targets import FILL, KERNELS, TPUS, compiled, mesh_of, pools, shapes, size

from swiftkv_jax.kernels.common import chips

pytestmark = [
    pytest.mark.aot,
    # The compiler's own notes about machines that are not there, and about programs it cannot print.
    pytest.mark.filterwarnings("ignore"),
]
ATTENTION = [
    (kernel, name) for kernel, cases in KERNELS.items() for name, case in cases.items() if kernel != FILL
]


@pytest.mark.parametrize(("kernel", "case"), ATTENTION)
@pytest.mark.parametrize("chip", TPUS)
def test_attention_compiles_and_copies_no_pool(chip, kernel, case):
    memory = compiled(TPUS[chip], kernel, case, implementation="pallas_tpu").memory_analysis()
    # Queries and sums spread over the heads that share a matmul take some; a copy of a pool would take more.
    assert memory.temp_size_in_bytes < size(pools(kernel, case)) // 4


@pytest.mark.parametrize("case", KERNELS[FILL])
@pytest.mark.parametrize("chip", TPUS)
def test_the_fill_compiles_in_place(chip, case):
    memory = compiled(TPUS[chip], FILL, case, implementation="pallas_tpu").memory_analysis()
    assert memory.alias_size_in_bytes == size(pools(FILL, case))
    # For v5p alone XLA copies the angles into whole lanes; the stream, the weights and the pools nowhere.
    tokens = shapes(FILL, case)[0][0].shape[0]
    assert memory.temp_size_in_bytes <= (2 * 4 * 128 * tokens + (1 << 16) if chip == "v5p" else 0)


@pytest.mark.parametrize("chip", TPUS)
def test_a_kernel_may_use_all_the_memory_that_the_table_of_chips_gives_it(chip):
    """Block sizes are chosen by this table; the compiler takes any limit, and fails at what is not there."""
    mesh = mesh_of(TPUS[chip])

    def touch(x, out, room):
        room[0] = x[...]
        out[...] = room[-1]

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        limit = chips.current().vmem_limit
        page = jax.ShapeDtypeStruct((256, 1024), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        call = pl.pallas_call(
            touch,
            page,
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=[pltpu.VMEM((limit // 2**20 - 3, *page.shape), jnp.float32)],
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
        )
        jax.jit(call).lower(page).compile()
