"""DeepSeek-V2-Lite's attention over pages of latents, compiled for TPU v5p: what it takes beside its pool."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernel_targets import TPUS, mesh_of

from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core.form import Paged
from swiftkv_jax.core.rows import FORMS
from swiftkv_jax.kernels.common.pools import Pool

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
PUBLISHED = Path(__file__).parent.parent / "published_configs" / "deepseek-ai--DeepSeek-V2-Lite.json"
SEQUENCES, CONTEXT, PAGE = 16, 8192, 64


def test_decoding_takes_little_memory_beside_its_rows():
    """21 rows (split 15, share 2), 640 wide: keys and values of all heads are not made, and nothing of the
    pool is copied. `kv_b` is 4 MiB."""
    raw = json.loads(PUBLISHED.read_text())
    config = ModelConfig.from_hf({name: value for name, value in raw.items() if name != "auto_map"})
    mesh, form = mesh_of(TPUS["v5p"]), FORMS["latent"]
    latent, heads = config.latent, config.num_heads
    assert latent is not None
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        (stored,) = form.arrays(config)
    assert stored.width == 640, "whole lanes"

    def decode(q, kernel, pool, table, position):
        where = {"table": table, "sequence": jnp.arange(SEQUENCES), "position": position}
        how = {"window": 2**30, "capacity": CONTEXT, "implementation": "pallas_tpu"}
        return form.read(config, {"kernel": kernel}, q, Paged(pools=(Pool(pool),), row=7, **where, **how))

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    slots = CONTEXT // PAGE
    args = (
        shape(SEQUENCES, 1, heads, config.head_dim),
        shape(heads, latent.rank, latent.plain + latent.value),
        shape(21, SEQUENCES * slots, PAGE, stored.width),
        shape(SEQUENCES, slots, dtype=jnp.int32),
        shape(SEQUENCES, 1, dtype=jnp.int32),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        memory = jax.jit(decode).lower(*args).compile().memory_analysis()
    print(f"{memory.temp_size_in_bytes / 2**20:.2f} MiB")
    assert memory.temp_size_in_bytes <= 4 * 2**20
