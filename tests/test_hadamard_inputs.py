"""Rows of inputs as an engine stores them: transformed so that no number is much larger than the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine as tiny

from swiftkv_jax.config.rope import NONE, RopeConfig
from swiftkv_jax.core.matrices import hadamard
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.surgery import hadamard_inputs, to_slim
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.slim.measure import Reference
from swiftkv_jax.slim.texts import Pieces

FREE = {"num_kv_heads": 4, "head_dim": 12, "rope": RopeConfig(rope_type=NONE)}
PIECES = {7: 1, 48: 16, 60: 4, 384: 128}  # width -> numbers transformed together


def sylvester(size: int) -> np.ndarray:
    made = np.ones((1, 1))
    while len(made) < size:
        made = np.block([[made, made], [made, -made]])
    return made


@pytest.mark.parametrize("width", PIECES)
def test_pieces_are_multiplied_by_hadamard_matrices_and_come_back(width):
    x = np.random.default_rng(0).normal(size=(3, 5, width))
    got = np.asarray(hadamard(jnp.asarray(x, jnp.float32)))
    piece = PIECES[width]
    by_hand = x.reshape(3, 5, -1, piece) @ sylvester(piece)
    factor = 2.0 ** -(int(np.log2(piece)) // 2)
    assert np.abs(got.reshape(by_hand.shape) - factor * by_hand).max() < 1e-5
    assert np.abs(np.asarray(hadamard(jnp.asarray(got), inverse=True)) - x).max() < 2e-6
    # Signs times powers of two: in 16 bits the factors are exact too.
    ones = np.asarray(hadamard(jnp.eye(width, dtype=jnp.bfloat16)), np.float64)
    assert (np.asarray(hadamard(jnp.asarray(ones, jnp.float32), inverse=True)) == np.eye(width)).all()


def test_a_transformed_input_gives_its_keys_by_transformed_weights():
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        x, w = random.normal(size=(9, 384)), random.normal(size=(384, 60))
        got = hadamard(jnp.asarray(x)) @ hadamard(jnp.asarray(w.T), inverse=True).T
        assert np.abs(np.asarray(got) - x @ w).max() < 1e-12


def test_keys_of_sixteen_bit_inputs_lose_less_where_a_large_number_meets_large_weights():
    """Whisper-base has one of 22 among inputs of 0.6, before weights seven times as large as others."""
    random = np.random.default_rng(0)
    x, w = random.normal(size=(40, 384)).astype(np.float32), random.normal(size=(384, 60)).astype(np.float32)
    x[:, 5] *= 30
    w[5] *= 7
    ways = (x, w), (hadamard(jnp.asarray(x)), hadamard(jnp.asarray(w.T), inverse=True).T)
    errors = (x.astype(jnp.bfloat16).astype(np.float32) @ w - x @ w for x, w in map(jax.device_get, ways))
    stored, transformed = (np.sqrt(np.mean(error**2)) for error in errors)
    assert transformed < stored / 3, (transformed, stored)


@pytest.mark.slow("swiftkv")
@pytest.mark.parametrize("plan", ["standard", "swiftkv"])
def test_an_engine_stores_transformed_inputs_of_a_model_that_stays_the_same(plan):
    model, params = tiny.make_model(tiny.PLANS[plan].stored_as("x"), **FREE)
    llm = LLM.from_model(model, params, None, **tiny.SIZES)
    assert {row.form for row in llm.model.plan.rows} == {"hadamard_x"}
    tokens = jnp.asarray([tiny.prompts([31])[0]])
    run = jax.jit(forward, static_argnums=0)
    want, got = (run(*each, tokens) for each in ((model, params), hadamard_inputs(model, params)))
    assert np.abs(np.asarray(want) - np.asarray(got)).max() < 2e-5
    assert hadamard_inputs(llm.model, llm.params) == (llm.model, llm.params)  # once is enough


def test_a_large_number_among_inputs_spoils_no_others_in_eight_bits():
    plain, params = tiny.make_model(tiny.PLANS["standard"], **FREE | {"hidden_size": 128, "head_dim": 32})
    layers = []
    for stack in params["layers"]:
        (attention,) = stack["attentions"]
        attention = attention | {"norm": attention["norm"].at[:, 5].mul(30.0)}
        layers.append(stack | {"attentions": [attention]})
    rows = [
        p | {"k_proj": p["k_proj"] | {"kernel": p["k_proj"]["kernel"].at[:, 5].mul(3.0)}}
        for p in params["rows"]
    ]
    params = params | {"layers": layers, "rows": rows}
    tokens = np.asarray(tiny.prompts([40] * 8))
    ways = Reference(plain, params, Pieces(tokens, np.ones(tokens.shape, bool)), "int8")
    rows = to_slim(plain, params, "x")
    (inputs, _), (transformed, _) = ways.distance(*rows), ways.distance(*hadamard_inputs(*rows))
    (kept, _) = ways.distance(plain, params)
    assert transformed < inputs / 10 and transformed < 2 * kept, (inputs, transformed, kept)
