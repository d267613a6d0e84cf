"""Logits equal transformers' on the files it saved itself, in every family, and again after our export."""

import hf_models
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from swiftkv_jax.checkpoint.adapter import fingerprint
from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.config.model import ModelConfig

TOKENS = hf_models.tokens()


def our_logits(folder, **options):
    model, params = from_pretrained(folder, **options)
    return np.asarray(jax.jit(model.apply)({"params": params}, TOKENS)), model, params


@pytest.mark.parametrize("name", hf_models.CASES)
def test_logits_equal_transformers_and_files_come_back_bit_for_bit(name, tmp_path):
    theirs = hf_models.make(name)
    want, sure = hf_models.decided(lambda: hf_models.torch_logits(theirs, TOKENS))
    assert want.std() > 2, "flat logits would hide errors"
    got, model, params = our_logits(hf_models.save(theirs, tmp_path / "theirs"))
    np.testing.assert_allclose(got[sure], want[sure], rtol=0, atol=1e-4)

    save_pretrained(tmp_path / "ours", model, jax.device_get(params))
    again = hf_models.torch_logits(hf_models.load(tmp_path / "ours"), TOKENS)
    np.testing.assert_allclose(again[sure], want[sure], rtol=0, atol=1e-6)
    held, written = (load_file(tmp_path / made / "model.safetensors") for made in ("theirs", "ours"))
    assert written.keys() == held.keys()
    for key in held:
        np.testing.assert_array_equal(written[key], held[key], err_msg=key)
    assert ModelConfig.from_hf(tmp_path / "ours") == model.config
    assert fingerprint(tmp_path / "ours") == fingerprint(tmp_path / "theirs")


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("name", ["llama31_rope", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(name, tmp_path):
    """The same bf16 weights, computed in fp32 by transformers, are the truth that both bf16 runs miss.

    Bound: our rms error is at most 1.5 times theirs, and both are rounding (below 4 % of the logits' spread).
    """
    hf_models.save(hf_models.make(name).bfloat16(), tmp_path)
    truth = hf_models.torch_logits(hf_models.load(tmp_path, dtype="float32"), TOKENS)
    theirs = hf_models.torch_logits(hf_models.load(tmp_path, dtype="bfloat16"), TOKENS)
    ours, model, params = our_logits(tmp_path)
    assert model.dtype == "bfloat16" and {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    our_error, their_error = np.sqrt(np.mean((ours - truth) ** 2)), np.sqrt(np.mean((theirs - truth) ** 2))
    assert our_error < 1.5 * their_error
    assert 0 < our_error < 0.04 * truth.std()
    exact, _, _ = our_logits(tmp_path, dtype="float32")
    np.testing.assert_allclose(exact, truth, rtol=0, atol=1e-4)
