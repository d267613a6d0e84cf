"""A form of rows, a kind of MLP and a method to compare, each new, enter the code as one entry of a table."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import PLAIN, tiny

import swiftkv_jax as skv
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.layers import MLPS, Dense, linear_weights
from swiftkv_jax.core.loop import step
from swiftkv_jax.core.rows import FORMS, KeysValues
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.surgery import to_swiftkv

TOKENS = 19


class Fused(KeysValues):
    """Keys and values by one projection, as some checkpoints hold them."""

    projections: ClassVar[tuple[str, ...]] = ("pair_proj",)
    names: ClassVar[dict[str, str]] = {"pair_proj": "query_key_value"}

    def weights(self, config):
        width, out = ("D", config.hidden_size), ("E", 2 * config.kv_width)
        return {"pair_proj": linear_weights(width, out, config.qkv_bias, 0.02)}

    def finish(self, config, p, raw, at):
        return super().finish(config, p, tuple(jnp.split(raw[0], 2, axis=-1)), at)

    def convert(self, config, plain, solved, names):
        joined = {
            name: jnp.concatenate([plain[part][name] for part in KeysValues.projections], axis=-1)
            for name in plain["k_proj"]
        }
        return {"pair_proj": joined}


class Squared(Dense):
    """Without a gate, with squared ReLU (So et al., 2021)."""

    def weights(self, config):
        return {name: leaf for name, leaf in super().weights(config).items() if name != "gate_proj"}

    def __call__(self, config, p, h):
        return jnp.square(jax.nn.relu(h @ p["up_proj"]["kernel"])) @ p["down_proj"]["kernel"]


def stepped(model, params, tokens) -> np.ndarray:
    """Logits of the last token, from a cache filled in two chunks."""
    cache = Cache.dense(model.config, model.plan, 1, 64, jnp.float32)
    out = None
    for a, b in ((0, 7), (7, TOKENS)):
        where = jnp.arange(a, b), jnp.array([0, b - a]), jnp.array([b - a - 1])
        out, cache = jax.jit(step, static_argnums=0)(model, params, tokens[a:b], *where, cache)
    return np.asarray(out)[0]


@pytest.mark.slow("standard")
@pytest.mark.parametrize("plan", [KVPlan.standard(4), KVPlan.swiftkv(4, 2, 2)], ids=["standard", "acrosskv"])
def test_a_form_is_trained_cached_served_and_saved(plan, monkeypatch, tmp_path):
    monkeypatch.setitem(FORMS, "fused", Fused())
    config = dataclasses.replace(PLAIN, family="qwen2", qkv_bias=True, num_layers=4, windows=())
    plain, params = tiny(config, plan)
    model, converted = skv.to_slim(plain, params, "fused")
    tokens = jax.random.randint(jax.random.key(1), (TOKENS,), 0, config.vocab_size)
    want, got = (
        np.asarray(jax.jit(m.apply)({"params": p}, tokens[None]))
        for m, p in ((plain, params), (model, converted))
    )
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(stepped(model, converted, tokens), want[0, -1], atol=1e-5)
    slope = jax.jit(jax.grad(lambda p: forward(model, p, tokens[None]).sum()))(converted)
    assert all(np.abs(row["pair_proj"]["kernel"]).max() > 0 for row in slope["rows"])
    skv.save_pretrained(tmp_path, model, converted)
    assert "model.layers.0.self_attn.query_key_value.weight" in load_file(tmp_path / "model.safetensors")
    again, read = skv.from_pretrained(tmp_path, dtype="float32")
    assert again.plan == model.plan
    jax.tree.map(np.testing.assert_array_equal, read, converted)


def test_a_kind_of_mlp_has_its_own_runs_and_is_cached_and_distilled(monkeypatch):
    monkeypatch.setitem(MLPS, "squared", Squared())
    kinds = ("dense", "squared", "squared", "dense")
    config = dataclasses.replace(PLAIN, num_layers=4, windows=(), mlps=kinds)
    teacher, params = tiny(config, KVPlan.standard(4))
    assert weights.partition(teacher.plan, config.kinds)[0] == (range(0, 1), range(1, 3), range(3, 4))
    tokens = jax.random.randint(jax.random.key(1), (TOKENS,), 0, config.vocab_size)
    for model, p in ((teacher, params), to_swiftkv(teacher, params, KVPlan.swiftkv(4, 3))):
        want = np.asarray(jax.jit(model.apply)({"params": p}, tokens[None]))[0]
        np.testing.assert_allclose(stepped(model, p, tokens), want[-1], atol=1e-5)
    other = dataclasses.replace(config, mlps=("dense",) * 4)
    assert "gate_proj" in weights.layer(weights.init(other, teacher.plan, jax.random.key(0)), 1)["mlp"]
