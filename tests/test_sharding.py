"""Sharded equals unsharded, on 8 virtual devices; the table of axes; meshes that do not fit."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from processes_made import found_on

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core import predict, sharding, weights
from swiftkv_jax.core.model import Transformer

TRAINED = [
    "swiftkv (2, 2, 2)",
    "predictor (1, 2, 1, 4)",
    "swiftkv (1, 2, 1, 4)",
]  # data, fsdp, tensor, context
TRAINED += ["tail (1, 2, 1, 4)", "swiftkv (8, 1, 1)", "all (1, 8, 1)", "moe-swiftkv (2, 2, 2)"]
SERVED = ["generate (2, 2, 2)", "guess (2, 2, 2)", "moe-generate (2, 2, 2)"]
SPLASH = ["splash1073741824 (2, 2, 2)", "splash200 (2, 2, 2)"]
CONTEXTS = ["swiftkv (1, 1, 2, 2)", "all (1, 1, 1, 4)"]  # of four devices

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8
)
FURTHEST = 3e-5  # of any one parameter after three steps of 1e-3; 1.3e-5 was seen


def found(name: str) -> dict:
    """What the worker says of a name. It runs once in each worker of pytest, so a test is of all names."""
    return report((*TRAINED, *SERVED, *SPLASH))[name]


@functools.cache
def report(names: tuple[str, ...], devices: int = 8) -> dict[str, dict]:
    return found_on(devices, "sharded_worker.py", *names)


@pytest.mark.slow
def test_three_training_steps_equal_one_devices():
    """Parameters, gradients and metrics. Pure data parallelism keeps parameters whole."""
    for name in TRAINED:
        said = found(name)
        assert said["moved"] < 2e-6 and said["furthest"] < FURTHEST and said["worst"] < 2e-5, (name, said)
        assert (said["split"] > 0) == ("(8, 1, 1)" not in name), name


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTEXTS)
def test_positions_shared_out_among_four_devices_give_the_loss_of_one(name):
    said = report(tuple(CONTEXTS), 4)[name]
    assert said["loss"] < 1e-5 and said["moved"] < 2e-6, said
    assert said["furthest"] < FURTHEST and said["worst"] < 2e-5, said


@pytest.mark.slow
def test_generation_equals_one_devices():
    """Guesses of an exit head change no token there."""
    assert {name: found(name) for name in SERVED} == {name: {"same": True} for name in SERVED}


@pytest.mark.slow
def test_splash_on_a_mesh_is_the_definition():
    """Rows, kv heads and queries cut up; outputs and gradients, interpreted."""
    assert all(found(name)["worst"] < 1e-5 for name in SPLASH)


def test_every_weight_has_as_many_axis_letters_as_dimensions():
    config = dataclasses.replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    for weight in jax.tree.leaves(weights.weights(config, KVPlan.swiftkv(4, 2))):
        assert len(weight.axes.split()) == len(weight.shape), weight


def test_a_predictor_is_cut_over_both_axes_of_its_maps():
    """Else the largest, of 70B <- 8B, lies whole on every device, with its optimiser's state."""
    model = Transformer(CONFIG, KVPlan.standard(4))
    pair = predict.Predicted(model, model, Prediction((0, 1, 2, 3)))
    mesh = jax.sharding.AbstractMesh((1, 2, 1, 2), sharding.MESH_AXES)
    for kernel in (p["kernel"] for p in predict.described(pair)["predictor"]["rows"][0].values()):
        place = sharding.spec(kernel.axes, kernel.shape, mesh)
        assert kernel.shape == (4, 16, 16) and place == PartitionSpec(None, "fsdp", "tensor")


def test_axis_letters_map_to_mesh_axes():
    assert sharding.spec("D N") == PartitionSpec("fsdp", "tensor")
    assert sharding.spec("B T .") == PartitionSpec(("data", "fsdp"), "context", None)


def test_an_axis_that_does_not_divide_stays_whole():
    mesh = jax.sharding.AbstractMesh((1, 2, 1, 4), sharding.MESH_AXES)
    assert sharding.spec("D V", (6, 61), mesh) == PartitionSpec("fsdp", None)


@pytest.mark.parametrize("axes", [{"data": 3}, {"data": -1, "fsdp": -1}, {"tensor": 0}, {"fsdp": 5}])
def test_a_mesh_that_does_not_match_the_devices_says_so(axes):
    with pytest.raises(UsageError, match=r"mesh.*(does not match 1 device|at most one of them -1)"):
        sharding.make_mesh(**axes, devices=jax.devices()[:1])


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU v4 chip as `mesh_utils` sees it: four on a host, 2 x 2 x 1 of the torus."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int
    process_index: int

    platform, device_kind, core_on_chip = "tpu", "TPU v4", 0


def chips(x: int, y: int, z: int, slices: int = 1) -> list[Chip]:
    """Slices of x by y by z chips, host after host."""
    tori = itertools.product(range(slices), range(z), range(y // 2), range(x // 2), range(2), range(2))
    return [
        Chip(i, (2 * hx + dx, 2 * hy + dy, z), one, i // 4) for i, (one, z, hy, hx, dy, dx) in enumerate(tori)
    ]


def test_minus_one_takes_what_is_left():
    mesh = sharding.make_mesh(fsdp=-1, data=2, devices=chips(2, 2, 2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "context": 1, "tensor": 1}


def test_the_innermost_axis_is_a_ring_of_the_torus():
    """Four chips of one host, which are the first four in order, would be a square."""
    mesh = sharding.make_mesh(fsdp=16, tensor=4, devices=chips(4, 4, 4))
    for four in mesh.devices.reshape(16, 4):
        varied = [len({chip.coords[axis] for chip in four}) for axis in range(3)]
        assert sorted(varied) == [1, 1, 4]


@pytest.mark.parametrize(
    ("axes", "between"), [({"fsdp": 8, "tensor": 4}, "fsdp"), ({"data": 2, "fsdp": 4, "tensor": 4}, "data")]
)
def test_the_outermost_axis_goes_between_slices(axes, between):
    mesh = sharding.make_mesh(**axes, devices=chips(2, 2, 4, slices=2))
    halves = np.split(mesh.devices, 2, axis=sharding.MESH_AXES.index(between))
    assert [{chip.slice_index for chip in half.flat} for half in halves] == [{0}, {1}]


@pytest.mark.parametrize(
    ("axes", "shares"),
    [
        ({"fsdp": -1}, 4),  # every process has rows of its own
        ({"fsdp": 4, "tensor": 4}, 4),
        ({"fsdp": 8, "tensor": 2}, 4),
        ({"fsdp": 2, "context": 8}, 1),  # each has chips of both rows
        ({"tensor": 16}, 1),
    ],
)
def test_processes_that_hold_the_same_rows_bring_the_same_share(axes, shares):
    mesh = sharding.make_mesh(**axes, devices=chips(2, 2, 4))
    found = {process: sharding.share_of_rows(mesh, process) for process in range(4)}
    assert sorted(set(found.values())) == [(i, shares) for i in range(shares)]
    for row in mesh.devices.reshape(mesh.shape["fsdp"], -1):
        assert len({found[chip.process_index] for chip in row}) == 1


def test_processes_that_hold_some_rows_in_common_are_refused():
    three = np.array([Chip(i, (i, 0, 0), 0, i // 4) for i in range(12)]).reshape(1, 4, 3, 1)
    with pytest.raises(UsageError, match=r"a part of the rows of others"):
        sharding.share_of_rows(jax.sharding.Mesh(three, sharding.MESH_AXES), 0)
