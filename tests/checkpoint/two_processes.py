"""One of two processes that save a model spread over both: PORT INDEX FOLDER; run by test_hf.py."""

import sys

import jax

import swiftkv_jax as skv
from swiftkv_jax.core import sharding, weights

CONFIG = skv.ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
)
PLAN = skv.KVPlan.swiftkv(3, 1)


def make():
    return weights.init(CONFIG, PLAN, jax.random.key(0))


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    assert len(jax.local_devices()) == 2 and jax.process_count() == 2
    places = jax.tree.map(lambda leaf: leaf.sharding, weights.abstract(CONFIG, PLAN, "float32", mesh))
    params = jax.jit(make, out_shardings=places)()
    assert not params["embed"].is_fully_addressable
    skv.save_pretrained(sys.argv[3], skv.Transformer(CONFIG, PLAN), params)
    jax.distributed.shutdown()
