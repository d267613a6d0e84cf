"""Figures carry the length that documents have."""

import dataclasses

import jax
import numpy as np
import pytest
from samples_made import write
from tokenizers_made import make_tokenizer

from swiftkv_jax.checkpoint.hf import save_pretrained
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.distill import loop
from swiftkv_jax.distill.config import Experiment, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig, evaluation_batches
from swiftkv_jax.text.tokenizer import load_tokenizer

COUNT, LONGEST = 40, 42  # documents; tokens of the longest, BOS and EOS included


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Experiment:
    """Forty texts of 2 to 40 letters, each of which is a token."""
    place = tmp_path_factory.mktemp("lengths")
    tokenizer = load_tokenizer(make_tokenizer(place))
    rows = [{"text": chr(97 + i % 26) * (2 + i * 38 // (COUNT - 1))} for i in range(COUNT)]
    source = write(place, rows)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    architecture = ModelConfig(vocab_size=tokenizer.vocab_size, num_layers=2, **sizes)
    model = Transformer(architecture, KVPlan.standard(2))
    params = weights.init(architecture, model.plan, jax.random.key(0))
    save_pretrained(place / "model", model, params, tokenizer=place)
    data = DataConfig(sources=(source,), seq_len=96, batch_size=2)
    return Experiment(
        name="lengths",
        model=str(place / "model"),
        plan=PlanConfig(split=1, init="fold"),
        data=data,
        evaluation=data,
        evaluation_batches=0,
        eval_lengths=(16, 48, 96),
        dtype="float32",
        steps=1,
        remat=False,
    )


def test_a_length_that_no_document_has_is_not_evaluated(experiment, tmp_path):
    """Its figures would be those of the length below, to the last digit."""
    with loop.opened(experiment, tmp_path / "run", say=lambda _: None) as run:
        assert run.longest == {16: 16, 48: LONGEST, 96: LONGEST} and list(run.held_out) == [16, 48]
        rows = run.row_sums()[48]
        data = dataclasses.replace(experiment.evaluation, piece_lengths=(96,))
        again = run.evaluate_rows(evaluation_batches(data, run.tokenizer))
        assert all(np.array_equal(rows[name], again[name]) for name in rows)
        found = run.go().evaluation
    assert {name.partition("/")[0] for name in found} == {"16", "48"}


@pytest.mark.parametrize("lengths, kept", [((96, 48), [48]), ((48,), [48]), ((8, 16), [8, 16]), ((), [96])])
def test_the_shortest_of_lengths_is_always_evaluated(lengths, kept, experiment, tmp_path):
    experiment = dataclasses.replace(experiment, eval_lengths=lengths)
    with loop.opened(experiment, tmp_path / "run", say=lambda _: None) as run:
        assert list(run.held_out) == kept
