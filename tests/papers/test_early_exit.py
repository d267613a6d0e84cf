"""Figure B.1's numbers against float64 over transformers' own streams, and the command line."""

import hf_models
import numpy as np
import pytest
import torch
from tokenizers_made import make_words

from benchmarks.papers import early_exit
from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.surgery import to_swiftkv

LENGTH, BLOCK = 57, 25  # the last block is ragged


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A transformers model with a tokenizer (word wN is token N), and its student of the last layer.

    Untrained, that student is its teacher, so transformers can say what the whole model answers.
    """
    teacher, student = (tmp_path_factory.mktemp(name) for name in ("teacher", "student"))
    make_words(hf_models.save(hf_models.make("llama_biases"), teacher))
    model, params = to_swiftkv(*from_pretrained(teacher), KVPlan.swiftkv(4, 3), exit_head=True)
    save_pretrained(student, model, params, source=teacher)
    return teacher, student


def truth(teacher, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(largest probability, agreement) in float64 from the stream entering transformers' layer 3."""
    model = hf_models.load(teacher)
    gain, kernel = (w.detach().double().numpy() for w in (model.model.norm.weight, model.lm_head.weight))
    sure, agree = [], []
    for start in range(0, len(tokens), BLOCK):
        with torch.no_grad():
            out = model(torch.tensor(tokens[None, start : start + BLOCK]), output_hidden_states=True)
        x, final = out.hidden_states[3][0].double().numpy(), out.logits[0].double().numpy()
        for stream, scores in zip(x, final, strict=True):
            early = kernel @ (stream / np.sqrt((stream**2).mean() + model.config.rms_norm_eps) * gain)
            sure.append(1 / np.exp(early - early.max()).sum())
            agree.append(early.argmax() == scores.argmax())
    return np.array(sure), np.array(agree)


def test_every_position_agrees_with_transformers_in_float64(folders):
    tokens = hf_models.tokens(LENGTH, 1)[0]
    sure, agree = early_exit.measure(*from_pretrained(folders[1]), tokens, BLOCK)
    want, same = truth(folders[0], tokens)
    np.testing.assert_allclose(sure, want, atol=1e-5)
    np.testing.assert_array_equal(agree, same)
    assert 5 < same.sum() < LENGTH - 5 and np.ptp(want) > 0.3


def test_confidence_bins_equal_hand_computed_ones():
    sure, agree = np.array([0.0, 0.24, 0.25, 0.6, 0.99, 1.0]), np.array([1, 0, 1, 0, 1, 1], bool)
    share, right = early_exit.by_bin(sure, agree, 4)
    np.testing.assert_allclose(share, np.array([2, 1, 1, 2]) / 6)
    np.testing.assert_allclose(right, [0.5, 1, 0, 1])
    assert np.isnan(early_exit.by_bin(sure[:2], agree[:2], 4)[1][1:]).all()
