"""KV prediction in plain PyTorch on two transformers models agrees with ours, token by token.

Written from the paper (sections 4.1 and 4.2): hooks take the auxiliary's keys and values where they leave
their projections, linear maps turn them into the base's, the base's own key norm and rotation finish the
keys, and transformers' cache and attention do the rest.
"""

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from swiftkv_jax.checkpoint.hf import from_pretrained
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import Prediction
from swiftkv_jax.core import predict
from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.loop import step
from swiftkv_jax.core.predict import Caches, Predicted

PROMPT, NEW = 23, 16
# (family, fields of the base, fields of the auxiliary, reads, tail)
CASES = {
    "llama_of_other_width": (
        "llama",
        {"head_dim": 20},
        {"hidden_size": 32, "num_hidden_layers": 3, "num_key_value_heads": 1},
        (0, 1, 1, 2),
        1,
    ),
    "llama_of_other_theta_and_scaling": (
        "llama",
        {"rope_scaling": hf_models.LLAMA3, "rope_theta": 5e5, "num_key_value_heads": 4},
        {"rope_theta": 1e2, "num_hidden_layers": 3},
        (0, 0, 2, 1),
        1,
    ),
    "qwen3_norms": (
        "qwen3",
        {"head_dim": 20, "rope_theta": 1e6},
        {"head_dim": 24, "num_hidden_layers": 2, "hidden_size": 32},
        (0, 0, 1, 1),
        1,
    ),
    "qwen2_biases": ("qwen2", {}, {"num_hidden_layers": 2, "num_key_value_heads": 1}, (0, 1, 1, 1), 1),
    "a_tail_of_three": ("qwen2", {}, {"num_hidden_layers": 3}, (0, 1, 2, 2), 3),
}


class Oracle:
    """Two transformers models and random linear maps from the rows of one to those of the other."""

    def __init__(self, base, auxiliary, reads: tuple[int, ...], tail: int):
        self.base, self.auxiliary, self.reads, self.tail = base, auxiliary, reads, tail
        torch.manual_seed(5)
        inside, outside = (self._width(model) for model in (auxiliary, base))
        make = [torch.nn.Linear(inside, outside) for _ in range(2 * len(reads))]
        self.maps = {"k_proj": make[::2], "v_proj": make[1::2]}
        for linear in make:  # rows of the size that models have
            torch.nn.init.normal_(linear.weight, std=inside**-0.5)

    @staticmethod
    def _width(model) -> int:
        return model.model.layers[0].self_attn.k_proj.out_features

    def predictor(self) -> dict:
        """The maps as our parameters."""

        def one(linears):
            kernel = np.stack([linear.weight.detach().numpy().T for linear in linears])
            return {"kernel": kernel, "bias": np.stack([linear.bias.detach().numpy() for linear in linears])}

        return {"rows": [{name: one(linears) for name, linears in self.maps.items()}]}

    @torch.no_grad()
    def generate(self, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(greedy tokens, logits after the prompt and after each of them but the last)."""
        read = len(prompt) - self.tail
        cache = self._predicted(torch.tensor(prompt[None, :read]))
        given, tokens, found = torch.tensor(prompt[None, read:]), [], []
        for _ in range(NEW):
            places = torch.arange(read, read + given.shape[1])[None]
            out = self.base(given, **{hf_models.CACHE: cache}, position_ids=places, use_cache=True).logits[
                0, -1
            ]
            read += given.shape[1]
            found.append(out.numpy())
            tokens.append(int(out.argmax()))
            given = torch.tensor([[tokens[-1]]])
        return np.array(tokens), np.stack(found)

    def _predicted(self, ids) -> DynamicCache:
        seen, hooks = {}, []
        for number, layer in enumerate(self.auxiliary.model.layers):
            for name in self.maps:

                def keep(module, args, out, key=(number, name)):
                    seen[key] = out

                hooks.append(getattr(layer.self_attn, name).register_forward_hook(keep))
        self.auxiliary(ids)
        for hook in hooks:
            hook.remove()
        cache, places = DynamicCache(), torch.arange(ids.shape[1])[None]
        cos, sin = self.base.model.rotary_emb(torch.zeros(1), places)
        for number, (read, layer) in enumerate(zip(self.reads, self.base.model.layers, strict=True)):
            attention = layer.self_attn
            k, v = (
                self.maps[name][number](seen[read, name]).unflatten(-1, (-1, attention.head_dim))
                for name in ("k_proj", "v_proj")
            )
            k = (attention.k_norm(k) if hasattr(attention, "k_norm") else k).transpose(1, 2)
            cache.update(apply_rotary_pos_emb(k, k, cos, sin)[1], v.transpose(1, 2), number)
        return cache


@pytest.fixture(scope="module", params=CASES)
def both(request, tmp_path_factory):
    """(the oracle, our model, our parameters) of one pair."""
    family, base, auxiliary, reads, tail = CASES[request.param]
    folder = tmp_path_factory.mktemp("pair")
    made = [hf_models.build(family, seed=i, **fields) for i, fields in enumerate((base, auxiliary))]
    (base, base_params), (auxiliary, aux_params) = (
        from_pretrained(hf_models.save(model, folder / str(i))) for i, model in enumerate(made)
    )
    oracle = Oracle(*made, reads, tail)
    model = Predicted(base, auxiliary, Prediction(reads, tail))
    params = {"base": base_params, "auxiliary": aux_params, "predictor": oracle.predictor()}
    return oracle, model, jax.tree.map(jnp.asarray, params)


def ours(model: Predicted, params, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logits after the prompt, and after each of `tokens` but the last, from pools of both models."""

    def empty(part):
        return Cache.dense(part.config, part.plan, 1, PROMPT + NEW, jnp.float32)

    caches, read = Caches(*map(empty, predict.cached(model))), len(prompt) - model.prediction.tail
    fill = jax.jit(predict.fill, static_argnums=0)
    for start, stop in ((0, 9), (9, read)):
        places = jnp.arange(start, stop)
        ends = jnp.array([0, stop - start])
        caches = fill(model, params, jnp.asarray(prompt[start:stop]), places, ends, caches)
    run, cache, out = jax.jit(step, static_argnums=0), caches.base, []
    for given in (prompt[read:], *tokens[:-1, None]):
        places, ends = jnp.arange(read, read + len(given)), jnp.array([0, len(given)])
        got, cache = run(
            model.base, params["base"], jnp.asarray(given), places, ends, jnp.array([len(given) - 1]), cache
        )
        out.append(np.asarray(got[0]))
        read += len(given)
    return np.stack(out)


@pytest.mark.slow("a_tail_of_three", "llama_of_other_theta_and_scaling", "llama_of_other_width")
def test_prompt_and_sixteen_generated_tokens_equal_the_oracle(both):
    oracle, model, params = both
    prompt = hf_models.tokens(PROMPT, 1)[0]
    tokens, want = oracle.generate(prompt)
    np.testing.assert_allclose(ours(model, params, prompt, tokens), want, rtol=0, atol=1e-4)
    assert len(set(tokens.tolist())) > 3, "an answer that repeats itself would hide errors"


def test_the_definition_equals_the_oracle_at_every_prompt_length(both):
    oracle, model, params = both
    if oracle.tail > 1:
        with pytest.raises(UsageError, match="tail"):
            predict.forward(model, params, jnp.zeros((1, 4), jnp.int32))
        return
    prompt = hf_models.tokens(PROMPT, 1)[0]
    x = jax.jit(predict.forward, static_argnums=0)(model, params, prompt[None])
    got = np.asarray(logits(model.base, params["base"], x))[0]
    for length in (2, 7, PROMPT):
        _, want = oracle.generate(prompt[:length])
        np.testing.assert_allclose(got[length - 1], want[0], rtol=0, atol=1e-4)
