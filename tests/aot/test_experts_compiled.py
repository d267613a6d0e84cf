"""Expert MLPs at DeepSeek-V2-Lite's layer, compiled for H100 and v5p: little memory, one all-reduce on 8."""

import re

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax.core import sharding
from swiftkv_jax.distill.compile_only import compiled, topology
from swiftkv_jax.kernels.expert_mlp.cases import REAL

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
CHIPS = {"h100": "h100:1x1x{}", "v5p": "v5p:2x2x{}"}


def made(chip: str, case: str, devices: int, gradient: bool = False):
    """(compiled call, its text), with the experts over the axis `tensor`; the gradient by tokens alone."""
    where = CHIPS[chip].format(devices if chip == "h100" else max(1, devices // 4))
    mesh = sharding.make_mesh(tensor=devices, devices=topology(where)[1][:devices])
    call = REAL[case].by(None, sharding.SHARDS)

    def run(x, chosen, weights, *rest):
        if not gradient:
            return call(x, chosen, weights, *rest)
        return jax.vjp(lambda x, weights: call(x, chosen, weights, *rest), x, weights)[1](rest[-1])

    shapes, _ = REAL[case].shapes()
    places = [NamedSharding(mesh, PartitionSpec("tensor" if 3 <= i < 6 else None)) for i in range(7)]
    args = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p) for s, p in zip(shapes, places, strict=True)]
    with jax.set_mesh(mesh), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return compiled(jax.jit(run).lower(*args))


def mebibytes(program) -> float:
    return program.memory_analysis().temp_size_in_bytes / 2**20


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("case, most", [("v2_lite", 256), ("v2_lite_decode", 64), ("v2_lite_one", 32)])
@pytest.mark.parametrize("chip", CHIPS)
def test_no_copy_of_all_experts(chip, case, most, gradient):
    """The experts have 1056 MiB. Gradients of theirs that nothing needs take nothing."""
    if gradient and case != "v2_lite":
        pytest.skip("training has many tokens")
    assert mebibytes(made(chip, case, 1, gradient)[0]) < most


def test_a_tpu_multiplies_chosen_rows_alone():
    """XLA counts a block of a loop once; on a GPU tiles are counted by arithmetic, in tests/kernels."""
    program, text = made("v5p", "v2_lite", 1)
    blocks = 2
    assert "ragged-dot" in text
    assert blocks * program.cost_analysis()["flops"] < 1.2 * REAL["v2_lite"].flops


@pytest.mark.parametrize("chip", CHIPS)
def test_one_all_reduce_on_eight(chip):
    program, text = made(chip, "v2_lite", 8)
    found = re.findall(r" (all-reduce|all-gather|all-to-all|reduce-scatter)(?:-start)?\(", text)
    assert found == ["all-reduce"] and mebibytes(program) < 256
