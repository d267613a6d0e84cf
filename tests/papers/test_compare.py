"""The comparison at equal FLOPs: its prompts, its counts, its averages, and what it writes."""

import json

import jax
import numpy as np
import pytest
from tiny_models import PLAIN, tiny

import swiftkv_jax as skv
from benchmarks.papers.baselines import RandomPruning
from benchmarks.papers.compare import evaluation, row_errors
from benchmarks.papers.compare.evaluation import Prompts
from benchmarks.papers.compare.systems import full_depth
from benchmarks.papers.prediction_flops import Sizes
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core import predict
from swiftkv_jax.distill.data.sources import open_documents, split_of
from swiftkv_jax.text.tokenizer import load_tokenizer

ROWS = np.random.default_rng(0).integers(0, PLAIN.vocab_size, (5, 12)).astype(np.int32)
PROMPTS = Prompts(ROWS, np.array([[2, 11, 7], [3, 4, 5], [6, 8, 10], [9, 2, 2], [11, 6, 3]], np.int32))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """400 documents, some of them held out."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = (
        json.dumps({"text": f"What follows {i} is {i + 1}, not {i - 1}. " * 12}) + "\n" for i in range(400)
    )
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def test_prompts_are_the_beginnings_of_held_out_documents_of_every_length(text):
    folder = DEMO / "teacher"
    found = evaluation.prompts_of(text, folder, 300, 64)
    assert found.lengths.size >= 300 and found.tokens.shape[1] == 64
    assert found.lengths.min() == 2 and found.lengths.max() == 63
    counts = np.histogram(found.lengths, bins=4, range=(2, 64))[0]
    assert counts.min() > 0.9 * counts.mean()
    row, each = 3, found.lengths[3, 0]
    assert found.targets[row, 0] == found.tokens[row, each]
    documents, tokenizer = open_documents((text,)), load_tokenizer(folder)
    held_out = next(d for i in range(len(documents)) if split_of((d := documents[i]).id) == "held_out")
    assert found.tokens[0].tolist() == tokenizer.encode(held_out.text)[:64]


@pytest.mark.slow
def test_answers_by_rows_and_by_prompts_are_the_models_own_when_nothing_is_left_out():
    model, params = tiny(PLAIN, KVPlan.standard(4))
    scores = np.asarray(jax.jit(model.apply)({"params": params}, ROWS), np.float64)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    at = np.take_along_axis(scores, PROMPTS.lengths[..., None] - 1, axis=1)
    want = -np.take_along_axis(at, PROMPTS.targets[..., None], axis=2)[..., 0]
    by_rows = evaluation.answers_by_rows(model, params, PROMPTS)
    by_prompts, flops = evaluation.answers_by_prompts(model, params, RandomPruning(keep=1.0), PROMPTS)
    for found in (by_rows, by_prompts):
        np.testing.assert_allclose(found.nats, want, atol=2e-5)
        np.testing.assert_array_equal(found.likeliest, at.argmax(-1))
    assert flops == sum(full_depth(Sizes.of(PLAIN), int(n)) for n in PROMPTS.lengths.ravel())


def pair(reads=(0, 1, 2, 3)) -> tuple[skv.Predicted, dict]:
    """A model that reads prompts for itself."""
    base, params = tiny(PLAIN, KVPlan.standard(4))
    model = skv.Predicted(base, base, Prediction(reads))
    return model, {"base": params, "auxiliary": params, "predictor": predict.identity(model)}


def test_errors_of_rows_are_mean_differences_by_place_and_their_distribution():
    """The pair predicts its rows exactly, so the only error is the added one: 0.5 to the values of row 2."""
    model, params = pair()
    off = params["predictor"]["rows"][0]["v_proj"]
    off["bias"] = off["bias"].at[2].set(0.5)
    found = row_errors.row_errors(model, params, ROWS)
    keys, values = found.l1
    assert values.shape == (4, ROWS.shape[1]) and np.abs(keys).max() < 1e-5
    np.testing.assert_allclose(values[2], 0.5, atol=1e-5)
    assert np.abs(np.delete(values, 2, axis=0)).max() < 1e-5
    where = np.searchsorted(found.edges[1], 0.5 - 1e-3) - 1
    numbers = ROWS.size * PLAIN.kv_width
    assert found.counts[1, 2, where - 1 :].sum() > 0.4 * numbers  # the histogram ends near what is usual
    assert found.counts[1].sum(1).max() <= numbers and found.counts[1, 0, 49:51].sum() == numbers
