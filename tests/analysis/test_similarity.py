"""Equation 1 against float64 loops over transformers' own hidden states."""

import hf_models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiftkv_jax.analysis import similarity
from swiftkv_jax.checkpoint.hf import from_pretrained

CASES = ("llama_biases", "qwen3_bias_window")  # head_dim 24; one kv head, q/k norms, a sliding window
LENGTH, BLOCK = 57, 25  # the last block is ragged


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models by name."""
    return {name: hf_models.save(hf_models.make(name), tmp_path_factory.mktemp(name)) for name in CASES}


def true_matrix(folder, tokens: np.ndarray) -> np.ndarray:
    """Mean cosine between every two layers' inputs: a loop in float64 over transformers' hidden states."""
    model = hf_models.load(folder)
    layers = model.config.num_hidden_layers
    out = np.zeros((layers, layers))
    for start in range(0, len(tokens), BLOCK):
        ids = torch.tensor(tokens[None, start : start + BLOCK])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
        streams = [state[0].double().numpy() for state in states[:layers]]
        for i in range(layers):
            for j in range(layers):
                for a, b in zip(streams[i], streams[j], strict=True):
                    out[i, j] += (a @ b) / (np.linalg.norm(a) * np.linalg.norm(b)) / len(tokens)
    return out


@pytest.mark.parametrize("name", CASES)
def test_equals_a_float64_loop_over_transformers_hidden_states(name, folders):
    tokens = hf_models.tokens(LENGTH, 1)[0]
    got, matrix = similarity.layer_similarity(*from_pretrained(folders[name]), tokens, BLOCK)
    want = true_matrix(folders[name], tokens)
    np.testing.assert_allclose(matrix, want, atol=2e-6)
    layers = len(want)
    by_hand = [sum(want[i, j] for j in range(i + 1, layers)) / (layers - i - 1) for i in range(layers - 1)]
    np.testing.assert_allclose(got[:-1], by_hand, atol=2e-6)
    assert np.isnan(got[-1])
    assert np.ptp(by_hand) > 0.05  # the layers differ, so an average over the wrong ones would show


def test_suggested_split_by_hand():
    nan = np.nan
    assert similarity.suggested_split(np.array([0.1, 0.4, 0.6, 0.7, nan])) == 2
    assert (
        similarity.suggested_split(np.array([0.9, 0.9, 0.4, 0.7, nan])) == 3
    )  # an early bump does not count
    assert similarity.suggested_split(np.array([0.1, 0.2, 0.3, 0.5, nan])) == 4  # nothing is above 0.5
    assert similarity.suggested_split(np.array([0.9, 0.9, 0.9, nan])) == 1
    assert similarity.suggested_split(np.array([nan])) == 1


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=8), st.floats(-1, 1))
def test_suggested_split_is_the_least_with_nothing_low_above_it(values, threshold):
    scores = np.array([*values, np.nan])
    split = similarity.suggested_split(scores, threshold)
    assert 1 <= split <= len(values)  # a split that KVPlan.swiftkv takes
    assert all(score > threshold for score in values[split:])
    assert split == 1 or values[split - 1] <= threshold
