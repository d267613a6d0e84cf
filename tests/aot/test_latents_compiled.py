"""DeepSeek-V2-Lite's attention over pages of latents, compiled for TPU v5p: what it takes beside its pool."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernel_targets import TPUS, mesh_of

from swiftkv_jax.analysis.hlo import launched
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core.form import Paged
from swiftkv_jax.core.rows import FORMS
from swiftkv_jax.kernels.common.pools import Pool

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
PUBLISHED = Path(__file__).parent.parent / "published_configs" / "deepseek-ai--DeepSeek-V2-Lite.json"
SEQUENCES, CONTEXT, PAGE = 16, 8448, 64


def compiled(sequences: int, blocks: int, queries: int):
    """Attention over a row of 21 (split 15, share 2) by the TPU's kernel, and its pool's width."""
    raw = json.loads(PUBLISHED.read_text())
    config = ModelConfig.from_hf({name: value for name, value in raw.items() if name != "auto_map"})
    mesh, form = mesh_of(TPUS["v5p"]), FORMS["latent"]
    latent, heads = config.latent, config.num_heads
    assert latent is not None

    def read(q, kernel, pool, table, sequence, position):
        where = {"table": table, "sequence": sequence, "position": position}
        how = {"window": 2**30, "capacity": CONTEXT, "implementation": "pallas_tpu"}
        return form.read(config, {"kernel": kernel}, q, Paged(pools=(Pool(pool),), row=7, **where, **how))

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    slots = CONTEXT // PAGE
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        (stored,) = form.arrays(config)
        args = (
            shape(blocks, queries, heads, config.head_dim),
            shape(heads, latent.rank, latent.plain + latent.value),
            shape(21, SEQUENCES * slots, PAGE, stored.width),
            shape(sequences, slots, dtype=jnp.int32),
            shape(blocks, dtype=jnp.int32),
            shape(blocks, queries, dtype=jnp.int32),
        )
        return jax.jit(read).lower(*args).compile(), stored.width


def test_decoding_takes_little_memory_beside_its_rows():
    """Keys and values of all heads are not made, and nothing of the pool is copied. `kv_b` is 4 MiB."""
    made, width = compiled(SEQUENCES, SEQUENCES, 1)
    assert width == 640, "whole lanes"
    memory = made.memory_analysis()
    print(f"{memory.temp_size_in_bytes / 2**20:.2f} MiB")
    assert memory.temp_size_in_bytes <= 4 * 2**20


def test_a_prompts_chunk_is_expanded_in_place():
    """2048 queries, of which the kernel takes 256 at a time, over keys of 16 x 256 numbers and values of
    16 x 128, 99 MiB, which are made by their products where they lie: there is no copy of them."""
    made, _ = compiled(1, 16, 128)
    hlo, memory = made.as_text(), made.memory_analysis()
    print(f"{memory.temp_size_in_bytes / 2**20:.2f} MiB, {made.cost_analysis()['flops'] / 1e9:.2f} GFLOP")
    assert memory.temp_size_in_bytes <= 144 * 2**20
    assert re.search(r"f32\[8,16,256,128\]\S* custom-call\(", hlo)
    for width in (4096, 2048):
        pool = rf"= bf16\[1,132,64,{width}\]\S* "
        assert re.search(pool + "custom-call", hlo) and not re.search(pool + "(copy|transpose|pad)", hlo)
        assert re.search(pool + r"fusion\(.*dot_general", hlo)
    assert len(launched(hlo)[1]) == 1 and "constant(9)" in hlo, "a loop of known length, which is not marked"
