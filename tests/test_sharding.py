"""Sharded equals unsharded, on 8 virtual devices; the table of axes; meshes that do not fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec

from swiftkv_jax import params as weights
from swiftkv_jax import sharding
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.errors import UsageError
from swiftkv_jax.plan import KVPlan

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def report():
    """What sharded_worker.py found: it needs 8 devices, which a process gets at its start or never."""
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-tests"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    worker = [sys.executable, str(ROOT / "tests" / "sharded_worker.py")]
    done = subprocess.run(worker, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


SHAPES = ["(8, 1, 1)", "(1, 8, 1)", "(2, 2, 2)"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["swiftkv", "all"])
def test_three_training_steps_equal_one_devices(report, kind, shape):
    found = report[f"{kind} {shape}"]
    assert found["worst"] < 2e-5
    assert (found["split"] > 0) == (shape != "(8, 1, 1)")  # pure data parallelism keeps parameters whole


@pytest.mark.parametrize("shape", SHAPES)
def test_generation_equals_one_devices(report, shape):
    assert report[f"generate {shape}"]["same"]


def test_an_exit_heads_guesses_on_a_mesh_change_no_token(report):
    assert report["guess"]["same"]


def test_every_weight_has_as_many_axis_letters_as_dimensions():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 4}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    config = ModelConfig(**sizes, **heads, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    for weight in jax.tree.leaves(weights.weights(config, KVPlan.swiftkv(4, 2))):
        assert len(weight.axes.split()) == len(weight.shape), weight


def test_the_table():
    assert sharding.spec("D N") == PartitionSpec("fsdp", "tensor")
    assert sharding.spec("B T .") == PartitionSpec(("data", "fsdp"), None, None)


def test_an_axis_that_does_not_divide_stays_whole():
    mesh = jax.sharding.AbstractMesh((1, 2, 4), sharding.MESH_AXES)
    assert sharding.spec("D V", (6, 61), mesh) == PartitionSpec("fsdp", None)


@pytest.mark.parametrize("axes", [{"data": 3}, {"data": -1, "fsdp": -1}, {"tensor": 0}, {"fsdp": 5}])
def test_a_mesh_that_does_not_match_the_devices_says_so(axes):
    with pytest.raises(UsageError, match=r"mesh.*(does not match 1 device|at most one of them -1)"):
        sharding.make_mesh(**axes, devices=jax.devices()[:1])


def test_minus_one_takes_what_is_left():
    assert dict(sharding.make_mesh(fsdp=-1, devices=jax.devices()[:1]).shape) == {
        "data": 1,
        "fsdp": 1,
        "tensor": 1,
    }
