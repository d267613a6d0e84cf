"""Cases of every kernel, lowered for a chip that is not here: the cheapest test that another version of JAX
takes the kernel. `make test-lane` runs it; the other files of this folder compile the same cases."""

import pytest
from kernel_targets import FILL, HOPPER, KERNELS, TPUS, lowered
from test_kernels_gpu import SUPPORTED
from test_kernels_tpu import ATTENTION

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]
# 8-bit keys take five seconds to lower; two other cases have them.
LONG = ("llama2_7b_int8", "llama2_7b_rotated_float8", "no_rope_int8")


@pytest.mark.parametrize(("kernel", "case"), [of for of in SUPPORTED if of[1] not in LONG])
def test_lowers_for_hopper(kernel, case):
    assert "mosaic_gpu" in lowered(HOPPER, kernel, case, implementation="pallas_gpu").as_text()


@pytest.mark.parametrize(("kernel", "case"), [*ATTENTION, *((FILL, case) for case in KERNELS[FILL])])
def test_lowers_for_a_tpu(kernel, case):
    assert "tpu_custom_call" in lowered(TPUS["v5e"], kernel, case, implementation="pallas_tpu").as_text()
