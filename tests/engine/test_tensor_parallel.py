"""Serving on several devices equals serving on one; what it communicates; what does not fit."""

import pytest
from processes_made import found_on

CASES = {
    "standard on 4": 1 / 4,
    "acrosskv by XLA on 2": 1 / 2,
    "int8 rows on 4": 1 / 4,
    "a norm over all heads on 4": 1 / 4,
    "a tail on 4": 1 / 4,
    "keys alone on 4": 1.0,  # a value is made of all of a key
    "prediction on 4": 1 / 4,  # of the base's pool
    "latents and experts on 4": 1.0,  # all heads read one latent
    "values alone on 4": 1.0,
    "inputs on 4": 1.0,
    "drafts on 4": 1 / 4,
    "int8 keys alone on 2": 1.0,
    "prediction with int8 rows on 2": 1 / 2,
}


@pytest.fixture(scope="module")
def report() -> dict:
    return found_on(4, "tensor_worker.py")


@pytest.mark.slow
def test_tokens_equal_one_devices_and_each_has_its_share_of_the_cache(report):
    """One test for all, since each worker of pytest that has one makes the report."""
    assert {case: report[case] for case in CASES} == {
        case: {"same": True, "share": share} for case, share in CASES.items()
    }


@pytest.mark.slow
def test_attention_does_not_communicate_and_a_step_little(report):
    """Three layers: two sums each, and at most eight for the embedding and sampling."""
    assert report["collectives"]["inner"] == 0 and report["collectives"]["step"] <= 2 * 3 + 8
    heads, devices, auxiliary = report["refused"]
    assert "heads" in heads and "tensor_parallel_size" in devices and "auxiliary" in auxiliary


@pytest.mark.slow
def test_a_folder_and_the_flax_module_on_a_mesh_are_those_on_one_device(report):
    """The module: logits of `apply` and of `apply(method="step")`."""
    assert report["folder"]["same"] and report["flax"] < 2e-5
