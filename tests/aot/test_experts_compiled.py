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
    whole, cut = (NamedSharding(mesh, PartitionSpec(axis)) for axis in (None, "tensor"))
    places = [whole] * 3 + [cut] * (len(shapes) - 4) + [whole]
    args = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p) for s, p in zip(shapes, places, strict=True)]
    with jax.set_mesh(mesh), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return compiled(jax.jit(run).lower(*args))


def mebibytes(program) -> float:
    taken = program.memory_analysis().temp_size_in_bytes / 2**20
    print(f"{taken:.1f} MiB")
    return taken


MOST = {
    "v2_lite": 256,
    "v2_lite_decode": 64,
    "v2_lite_one": 32,
    "v2_lite_int8": 256,
    "v2_lite_decode_fp8": 64,
}


@pytest.mark.parametrize(
    "case, gradient", [*((case, False) for case in MOST), ("v2_lite", True), ("v2_lite_int8", True)]
)
@pytest.mark.parametrize("chip", CHIPS)
def test_no_copy_of_all_experts(chip, case, gradient):
    """The experts have 1056 MiB, in 8 bits half of them. Gradients of theirs that nothing needs take nothing.
    Experts in 8 bits are made wide one at a time."""
    assert mebibytes(made(chip, case, 1, gradient)[0]) < MOST[case]


def test_a_tpu_multiplies_chosen_rows_alone():
    """XLA counts a block of a loop once; on a GPU tiles are counted by arithmetic, in tests/kernels."""
    program, text = made("v5p", "v2_lite", 1)
    blocks = 2
    assert "ragged-dot" in text
    ratio = blocks * program.cost_analysis()["flops"] / REAL["v2_lite"].flops
    print(f"{ratio:.3f} of the chosen experts' FLOPs")
    assert ratio < 1.2


@pytest.mark.parametrize("chip", CHIPS)
def test_one_all_reduce_on_eight(chip):
    program, text = made(chip, "v2_lite", 8)
    found = re.findall(r" (all-reduce|all-gather|all-to-all|reduce-scatter)(?:-start)?\(", text)
    assert found == ["all-reduce"] and mebibytes(program) < 256
