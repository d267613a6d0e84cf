"""Why a T4 does not compute in bfloat16, and that it can run the safe kernels: compiled without one."""

import functools
import math
import re

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh
from test_engine_programs import CONFIG, LANES, PLANS, TOKENS, a_step, on, text_of

from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.engine.loop import run_any
from swiftkv_jax.engine.settings import Settings, empty_pool
from swiftkv_jax.engine.validate import usual_dtype

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]

T4 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 65536 threads_per_core_limit: 1024 core_count: 40 fpus_per_core: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 320000000000 l2_cache_size: 4194304 clock_rate_ghz: 1.59 device_memory_size: 15843721216
  shared_memory_per_block_optin: 65536 cuda_compute_capability { major: 7 minor: 5 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "Tesla T4"
"""
USUAL, _ = usual_dtype(CONFIG.dtype, "gpu", (7, 5))


@pytest.mark.parametrize("dtype, widened", [("bfloat16", True), (USUAL, False)])
def test_xla_widens_the_weights_at_each_step_in_bfloat16_alone(dtype, widened):
    where = {"topology_name": "T4", "topology": "1x1x1", "target_config": T4}
    devices = topologies.get_topology_desc(platform="cuda", **where).devices
    mesh, plan = Mesh(np.array(devices), ("x",)), PLANS["swiftkv"]
    model = Transformer(CONFIG, plan, dtype)
    settings = Settings(max_model_len=1024, max_num_seqs=LANES, num_pages=256, attention="xla_one_turn")
    cache = jax.eval_shape(functools.partial(empty_pool, model, settings))
    params = weights.abstract(CONFIG, plan, dtype, cuts=None)
    traced = on(mesh, (params, cache, a_step(LANES, TOKENS, settings.pages_per_sequence)))
    _, hlo = text_of(run_any, (model,), traced, mesh)
    large = {math.prod(leaf.shape) for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    made = re.findall(r"= f32\[([\d,]+)\]\S* convert\(", hlo)
    sizes = [math.prod(map(int, dims.split(","))) for dims in made]
    assert bool(large & set(sizes)) == widened
