"""What a run starts from and what it leaves: data that the model cannot read, exports that lose weights."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_engine as tiny
from tokenizers_made import CHATML, make_tokenizer

from swiftkv_jax.checkpoint.hf import from_pretrained
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.rope import NONE, RopeConfig
from swiftkv_jax.distill import start
from swiftkv_jax.distill.config import Experiment, LossConfig
from swiftkv_jax.distill.data.loader import DataConfig
from swiftkv_jax.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("longer", ["data", "evaluation"])
def test_rows_longer_than_learned_positions_are_refused(longer, tmp_path):
    """A position beyond the table would be read as the last one of it."""
    learned = {
        "learned_positions": True,
        "max_position_embeddings": 32,
        "rope": RopeConfig(rope_type=NONE),
        "vocab_size": 300,
    }
    model, _ = tiny.make_model(tiny.PLANS["standard"], **learned)
    parts = {name: DataConfig(sources=("x",), seq_len=32, batch_size=2) for name in ("data", "evaluation")}
    experiment = Experiment(
        name="x",
        architecture=model.config,
        trainable="all",
        loss=LossConfig(kl_weight=0.0, lm_weight=1.0),
        **parts,
    )
    tokenizer = load_tokenizer(make_tokenizer(tmp_path, CHATML))
    mesh = jax.make_mesh((1,) * 4, ("data", "fsdp", "context", "tensor"))
    with jax.set_mesh(mesh):
        assert start.load(experiment, None, tokenizer, mesh)
        parts[longer] = dataclasses.replace(parts[longer], seq_len=33)
        with pytest.raises(UsageError, match=f"{longer}.seq_len 33 is more than the model's 32 positions"):
            start.load(dataclasses.replace(experiment, **parts), None, tokenizer, mesh)


def test_an_export_whose_type_cannot_hold_a_weight_is_refused(tmp_path):
    model, params = tiny.make_model(tiny.PLANS["standard"], qkv_bias=False)
    tokens = make_tokenizer(tmp_path / "tokenizer", CHATML)
    start.export(tmp_path / "fine", model, params, "float16", None, tokens)
    read, weights = from_pretrained(tmp_path / "fine")
    assert read.config.dtype == "float16" and weights["embed"].dtype == np.float16
    large = params | {"embed": params["embed"].at[3, 5].set(1e6)}
    with pytest.raises(UsageError, match="float16"):
        start.export(tmp_path / "large", model, large, "float16", None, tokens)
    assert not (tmp_path / "large").exists()
