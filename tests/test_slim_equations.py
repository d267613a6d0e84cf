"""Slim attention against its paper (arXiv 2503.05840): the equations in float64 numpy, nothing of ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import sized

from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import RopeConfig
from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.surgery import to_slim
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.k_cache_attention.api import k_cache_attention, x_cache_attention

TOKENS, HEADS, INPUTS, THETA = 13, 4, 24, 100.0
PLACE = (
    np.zeros((1, 1), np.int32),
    np.zeros(1, np.int32),
    np.arange(TOKENS, dtype=np.int32)[None],
)  # one page


def turned(heads: np.ndarray) -> np.ndarray:
    """Section 3: planes of a head's two halves, turned by m theta; [T, N, H]."""
    half = heads.shape[-1] // 2
    angle = np.arange(TOKENS)[:, None, None] * THETA ** (-np.arange(half) / half)
    a, b = heads[..., :half], heads[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1
    )


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Equation (3), causal: softmax(Q_i K_i^T / sqrt(d_k)) V_i of each head; all [T, N, H]."""
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(TOKENS, dtype=bool), scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nts,snu->tnu", e / e.sum(-1, keepdims=True), v)


class Model:
    """One layer's random projections in float64, and its inputs; heads of 6 are square, of 8 wide."""

    def __init__(self, width: int, rope: bool, bias: bool):
        self.width, self.rope = width, rope
        config = sized(
            9,
            INPUTS,
            8,
            1,
            HEADS,
            HEADS,
            width,
            family="qwen2",
            qkv_bias=bias,
            rope=RopeConfig(rope_type="default" if rope else "none", rope_theta=THETA),
        )
        self.model = Transformer(config, KVPlan.standard(1))
        random = np.random.default_rng(width)
        self.params = jax.tree.map(
            lambda w: jnp.asarray(random.standard_normal(w.shape) * 0.5),
            weights.weights(config, KVPlan.standard(1)),
        )
        self.x = random.standard_normal((TOKENS, INPUTS))
        self.q = random.standard_normal((TOKENS, HEADS, width))

    def projected(self, name: str) -> np.ndarray:
        """X W + b, [T, N * H]."""
        p = {key: np.asarray(leaf[0]) for key, leaf in self.params["rows"][0][name].items()}
        return self.x @ p["kernel"] + p.get("bias", 0.0)

    def heads(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(TOKENS, HEADS, self.width)

    def want(self) -> np.ndarray:
        """Vanilla attention with keys and values."""
        q, k, v = self.q, self.heads(self.projected("k_proj")), self.heads(self.projected("v_proj"))
        return attention(turned(q), turned(k), v) if self.rope else attention(q, k, v)

    def got(self, form: str, stored_turned: bool = False) -> np.ndarray:
        """The output by `to_slim`'s weights and the kernels."""
        _, slim = to_slim(self.model, self.params, form)
        held = (
            slim["layers"][0]["attentions"][0] if form == "x" else slim["rows"][0]
        )  # whose inputs those are
        held = {name: part for name, part in held.items() if isinstance(part, dict)}
        p = {name: {w: leaf[0] for w, leaf in part.items()} for name, part in held.items()}
        q = jnp.asarray(turned(self.q) if self.rope else self.q)[None]
        if form == "k":
            keys = self.projected("k_proj")
            if stored_turned:
                keys = turned(self.heads(keys)).reshape(TOKENS, -1)
            half = self.width // 2
            frequencies = jnp.asarray(THETA ** (-np.arange(half) / half)) if self.rope else None
            options = {"frequencies": frequencies, "rotated": stored_turned, "implementation": "reference"}
            out = k_cache_attention(
                q, self.pool(keys), p["kv_proj"]["kernel"], *map(jnp.asarray, PLACE), **options
            )
            return np.asarray(out[0] + p["kv_proj"].get("bias", 0.0))
        if form == "v":
            stored = self.projected("v_proj") - np.asarray(p["v_proj"].get("bias", 0.0))
            own = jnp.moveaxis(jnp.eye(HEADS * self.width).reshape(-1, HEADS, self.width), 1, 0)
            kernels, bias = (p["vk_proj"]["kernel"], own), self.heads_of(p["v_proj"])
        else:
            stored, bias = self.x, p["v_proj"].get("bias", 0.0)
            kernels = p["k_proj"]["kernel"], p["v_proj"]["kernel"]
        out = x_cache_attention(
            q, self.pool(stored), *kernels, *map(jnp.asarray, PLACE), implementation="reference"
        )
        return np.asarray(out[0] + bias)

    def heads_of(self, p: dict):
        return p["bias"].reshape(HEADS, self.width) if "bias" in p else 0.0

    def pool(self, rows: np.ndarray) -> tuple[Pool]:
        return (Pool(jnp.asarray(rows)[None, None]),)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("width", [6, 8], ids=["square", "wide"])
@pytest.mark.parametrize(
    "rope, stored_turned", [(False, False), (True, False), (True, True)], ids=["", "rope", "stored turned"]
)
def test_keys_alone_are_vanilla_attention(width, rope, bias, stored_turned):
    """Equations (4) and (5); the right inverse of section 5 where e > d; biases of section 4 and of Qwen."""
    case = Model(width, rope, bias)
    np.testing.assert_allclose(case.got("k", stored_turned), case.want(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("width", [6, 8], ids=["square", "wide"])
@pytest.mark.parametrize("form", ["v", "x"])
def test_values_alone_and_inputs_alone_are_vanilla_attention(form, width, bias):
    """The appendix (W_VK) and section 5's option 2, both without rotary embedding."""
    case = Model(width, False, bias)
    np.testing.assert_allclose(case.got(form), case.want(), rtol=0, atol=1e-9)
