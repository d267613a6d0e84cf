"""The engine by kernels by hand, interpreted on this CPU: they run, and tokens are the definition's."""

import collections
import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine as tiny
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.engine import loop
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.engine.settings import OPERATIONS, resolve
from swiftkv_jax.kernels.common.dispatch import ByKind, Implementation
from swiftkv_jax.kernels.fused_kv_fill import pallas_gpu as fill_gpu
from swiftkv_jax.kernels.fused_kv_fill import pallas_tpu as fill_tpu
from swiftkv_jax.kernels.fused_kv_fill.api import FUSED_KV_FILL
from swiftkv_jax.kernels.paged_attention import pallas_tpu as paged_tpu
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64, "page_size": 8}
LENGTHS = (1, 21, 8, 13)
FAMILIES = {
    "biases": {},
    "norm of keys": {"qkv_bias": False, "qk_norm": True, "num_kv_heads": 2, "head_dim": 16},
}
HOPPER = InterpretGPUParams()


@pytest.fixture
def interpret(monkeypatch):
    """Give a kernel a name under which it is interpreted; how often each was traced."""
    traced = collections.Counter()

    def name(table, kernel, run, how=True) -> str:
        new = f"interpreted {kernel.__name__}"

        def counted(*args, **kwargs):
            traced[new] += 1
            return run(*args, **kwargs, interpret=how)

        monkeypatch.setitem(table, new, Implementation(counted, kernel.refuses))
        if table is FUSED_KV_FILL:
            monkeypatch.setitem(OPERATIONS, "fill", (*OPERATIONS["fill"], new))
        return new

    name.traced = traced
    return name


def tokens(net, params, **settings) -> list[list[int]]:
    llm = LLM.from_model(net, params, tiny.Bytes(), **(SIZES | settings))
    outputs = llm.generate(tiny.prompts(LENGTHS), GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_tpu_kernels(interpret):
    net, params = tiny.make_model(tiny.PLANS["acrosskv"], **FAMILIES["norm of keys"])
    want = [tiny.greedy(net, params, prompt, 5) for prompt in tiny.prompts(LENGTHS)]
    fill = interpret(FUSED_KV_FILL, fill_tpu, fill_tpu.fused_kv_fill)
    attention = interpret(PAGED_ATTENTION, paged_tpu, paged_tpu.paged_attention)
    assert tokens(net, params, kernels=f"fill={fill},attention={attention}") == want
    assert all(interpret.traced[name] for name in (fill, attention))


@pytest.mark.slow
def test_tpu_kernels_round_as_xla_does(interpret):
    """Pages of 128, as 8-bit rows need them there."""
    net, params = tiny.make_model(tiny.PLANS["acrosskv"])
    fill = interpret(FUSED_KV_FILL, fill_tpu, fill_tpu.fused_kv_fill)
    attention = interpret(PAGED_ATTENTION, paged_tpu, paged_tpu.paged_attention)
    sizes = {"cache_dtype": "int8", "page_size": 128}
    named = f"fill={fill},attention={attention}"
    assert tokens(net, params, kernels=named, **sizes) == tokens(net, params, **sizes)


@pytest.mark.slow
def test_hopper_fill(interpret):
    """In bfloat16 equal tokens are not promised, but these few are the same."""
    shape = {"hidden_size": 64, "head_dim": 64}
    net, params = tiny.make_model(tiny.PLANS["acrosskv"], **shape)
    net, params = Transformer(net.config, net.plan, "bfloat16"), jax.tree.map(jnp.bfloat16, params)
    fill = interpret(FUSED_KV_FILL, fill_gpu, fill_gpu.fused_kv_fill, HOPPER)
    got, want = (tokens(net, params, kernels=f"fill={name}", page_size=16) for name in (fill, "xla"))
    assert got == want
    assert interpret.traced[fill]


@pytest.mark.parametrize("scoring, windows", [("reference", ()), ("xla", (64, 9, 1, 30))])
def test_scores_by_each_attention_of_whole_prompts(scoring, windows):
    net, params = tiny.make_model(tiny.PLANS["acrosskv"], windows=windows)
    (prompt,) = tiny.prompts((45,))
    named = "auto", f"scoring={scoring}"
    want, got = (LLM.from_model(net, params, **SIZES, kernels=names).score(prompt) for names in named)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert a.keys() == b.keys()
        assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in a)


def alive() -> list[jax.Array]:
    gc.collect()
    return jax.live_arrays()


@pytest.mark.slow
def test_a_named_fill_keeps_the_makers_once():
    """All that is alive when an engine stands is its weights, a norm's gain in the makers, and its pool."""
    (prompt,) = tiny.prompts((45,))
    owned, scored = {}, {}
    for fill in ("unfused", "xla"):
        kept = alive()  # held, so that no new array gets the identity of one that is gone
        before = {id(x) for x in kept}
        llm = LLM.from_model(*tiny.make_model(tiny.PLANS["acrosskv"]), **SIZES, kernels=f"fill={fill}")
        owned[fill] = sum(x.nbytes for x in jax.tree.leaves((llm.params, llm.engine.runner.cache)))
        new = sum(x.nbytes for x in alive() if id(x) not in before)
        assert new == pytest.approx(owned[fill], abs=1024)  # besides them a table of pages
        scored[fill] = [next(iter(one.values())).logprob for one in llm.score(prompt)[1:]]
    assert owned["xla"] == owned["unfused"] - 4 * llm.model.config.hidden_size  # the gain of the shared norm
    np.testing.assert_allclose(scored["xla"], scored["unfused"], atol=1e-4)


def test_kernels_that_score_run_on_one_device():
    """And cuDNN's on a GPU; a model without upper rows has no use for a fill."""
    net, params = tiny.make_model(tiny.PLANS["acrosskv"])
    settings = dataclasses.replace(LLM.from_model(net, params).settings, kernels="scoring=cudnn")
    with pytest.raises(UsageError, match="scoring"):
        resolve(settings, net, jax.devices() * 4)
    resolve(dataclasses.replace(settings, kernels="scoring=xla"), net, jax.devices() * 4)
    with pytest.raises(UsageError, match="causal_attention"):
        LLM.from_model(net, params, **SIZES, kernels="scoring=cudnn")
    with pytest.raises(UsageError, match="fill"):
        LLM.from_model(*tiny.make_model(tiny.PLANS["standard"]), **SIZES, kernels="fill=xla")


@pytest.mark.parametrize("fill", ["unfused", "xla"])
def test_a_step_of_prompts_updates_the_pool_in_place(fill):
    net, params = tiny.make_model(tiny.PLANS["acrosskv"])
    llm = LLM.from_model(net, params, **SIZES, num_pages=4096, kernels=f"fill={fill}")
    machine = llm.engine.runner
    table, survivors = np.zeros((2, machine.arrays.slots), np.int32), np.zeros(2, np.int32)
    flat, starts = np.zeros(32, np.int32), np.zeros(3, np.int32)
    inputs = loop.Inputs(flat, flat, starts, survivors, table)
    compiled = loop.run_any.lower(net, machine.params, machine.cache, inputs).compile()
    memory, pool = compiled.memory_analysis(), machine.cache.nbytes
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool / 20
    assert ("shared_norm" in machine.params) == (fill == "unfused")  # else its gain is in the makers


def test_attention_is_named_by_kind_of_call():
    """A kernel that refuses long blocks serves decoding beside another that takes chunks."""
    both = ByKind("xla", "reference")
    assert (both.of(1), both.of(ByKind.FEW), both.of(ByKind.FEW + 1)) == ("xla", "xla", "reference")
