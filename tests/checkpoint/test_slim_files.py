"""Slim attention on disk: read back bit for bit, the plain model to transformers, and what is refused."""

import json

import hf_models
import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import swiftkv_jax as skv
from swiftkv_jax.common.errors import UsageWarning
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.scan import forward

WIDTH = 48
FIELDS = {"num_key_value_heads": 4, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(transformers' model, ours, our parameters): Qwen2 in its multi-head form, with biases."""
    theirs = hf_models.build("qwen2", seed=5, **FIELDS)
    return theirs, *skv.from_pretrained(hf_models.save(theirs, tmp_path_factory.mktemp("plain")))


@pytest.fixture
def slim(plain, tmp_path):
    """A folder of that model with rows k, kv, k."""
    skv.save_pretrained(tmp_path, *skv.to_slim(*plain[1:], forms=("k", "kv", "k")))
    return tmp_path


def same(a, b) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize(
    "plan", [skv.KVPlan.standard(3), skv.KVPlan.swiftkv(3, 1, 2)], ids=["standard", "acrosskv"]
)
@pytest.mark.parametrize("forms", ["k", "mixed"])
def test_saved_slim_weights_are_read_back(plain, plan, forms, tmp_path):
    _, model, params = plain
    if plan.is_swiftkv:
        model, params = skv.to_swiftkv(model, params, plan)
    rows = len(plan.rows)
    slim, made = skv.to_slim(model, params, forms if forms == "k" else ["k", "kv", "k"][-rows:])
    skv.save_pretrained(tmp_path, slim, made)
    read, again = skv.from_pretrained(tmp_path)
    assert read.plan == slim.plan and same(made, again)
    off, kv = skv.from_pretrained(tmp_path, slim=False)
    assert off.plan == plan and same(params, kv)
    suffix = "_swiftkv" if plan.is_swiftkv else ""
    names = set(load_file(tmp_path / "model.safetensors"))
    last = "2" if not plan.is_swiftkv else "1"
    for part in ("k_proj", "v_proj", "kv_proj"):
        assert f"model.layers.{last}.self_attn.{part}{suffix}.weight" in names


@pytest.mark.slow("gpt2-v v v v", "gpt2-x x x x", "opt-v v v v", "opt-x x x x")
@pytest.mark.parametrize("forms", ["v v v v", "x x x x", "k v x kv"])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_rows_of_values_and_of_inputs_are_read_back_and_leave_the_plain_model(family, forms, tmp_path):
    theirs = hf_models.make(family)
    plain, params = skv.from_pretrained(hf_models.save(theirs, tmp_path / "plain"))
    slim, made = skv.to_slim(plain, params, forms.split())
    skv.save_pretrained(tmp_path / "slim", slim, made)
    read, again = skv.from_pretrained(tmp_path / "slim")
    assert read.plan == slim.plan and same(made, again)
    off, kv = skv.from_pretrained(tmp_path / "slim", slim=False)
    assert off.plan == plain.plan and same(params, kv)
    own = [name for name in load_file(tmp_path / "slim" / "model.safetensors") if ".vk_proj." in name]
    assert len(own) == forms.split().count("v") and all(name.endswith(".weight") for name in own)
    ids = hf_models.tokens(20)
    plainly = hf_models.load(tmp_path / "slim")
    np.testing.assert_array_equal(hf_models.torch_logits(plainly, ids), hf_models.torch_logits(theirs, ids))


STUDENTS = {  # share, forms of the rows of 6 layers at split 2 -> numbers of a token, in widths of the model
    "all upper inputs": (1, "kv kv x x x x", 5),
    "keys that others lie between": (1, "v kv k x k x", 6),
    "a group of inputs": (2, "kv kv k x", 6),
    "groups of inputs": (2, "kv k x x", 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("share, forms, widths", STUDENTS.values(), ids=STUDENTS)
def test_upper_layers_of_inputs_share_one_row(share, forms, widths, tmp_path):
    """split * 2e + d numbers per token (of 2 kv rows and inputs above), served, saved and read back."""
    theirs = hf_models.build("gpt2", **hf_models.GPT2 | {"num_hidden_layers": 6})
    teacher = skv.from_pretrained(hf_models.save(theirs, tmp_path / "plain"))
    model, params = skv.to_swiftkv(*teacher, skv.KVPlan.swiftkv(6, 2, share))
    slim, made = skv.to_slim(model, params, forms.split())
    with pytest.warns(UsageWarning):
        skv.save_pretrained(tmp_path / "slim", slim, made)
    read, again = skv.from_pretrained(tmp_path / "slim")
    assert read.plan == slim.plan and same(made, again)
    off, kv = skv.from_pretrained(tmp_path / "slim", slim=False)
    alone = share == 2 and "x x" in forms  # in the file each layer has a copy of its own
    assert off.plan == (skv.KVPlan.swiftkv(6, 2) if alone else model.plan) and (alone or same(params, kv))
    answers, prompts = [], hf_models.tokens(12).tolist()
    greedy = skv.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for each in ((model, params), (read, again), (off, kv)):
        llm = skv.LLM.from_model(*each, max_model_len=32, max_num_batched_tokens=5, cache_dtype="float32")
        answers.append([o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)])
        if each[0] is read:
            assert llm.cache_bytes_per_token == widths * WIDTH * 4
    assert answers[1] == answers[0] == answers[2]


def test_the_file_says_values_as_a_linear_map_of_keys(plain, slim):
    """values = kv_proj(keys), weight [out, in], for keys with their bias."""
    tensors = {
        name: array.astype(np.float64) for name, array in load_file(slim / "model.safetensors").items()
    }
    x = np.random.default_rng(0).standard_normal((5, 48))

    def linear(name, x):
        at = f"model.layers.0.self_attn.{name}"
        return x @ tensors[f"{at}.weight"].T + tensors[f"{at}.bias"]

    np.testing.assert_allclose(linear("kv_proj", linear("k_proj", x)), linear("v_proj", x), rtol=0, atol=1e-4)


def test_transformers_reads_the_plain_model(plain, slim):
    ids = hf_models.tokens(20)
    want = hf_models.torch_logits(plain[0], ids)
    np.testing.assert_array_equal(hf_models.torch_logits(hf_models.load(slim), ids), want)
    model, params = skv.from_pretrained(slim)
    assert model.plan.forms == ("k", "kv")
    got = jax.jit(lambda p, t: logits(model, p, forward(model, p, t)))(params, ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_an_llm_serves_what_the_file_says_or_the_plain_model(plain, slim):
    prompts = hf_models.tokens(12).tolist()
    params = skv.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs, sizes = [], []
    for on in (True, False):
        with pytest.warns(UsageWarning):
            llm = skv.LLM(slim, max_model_len=32, slim=on)
        outputs.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
        sizes.append(llm.cache_bytes_per_token)
        assert all("v_proj" not in row or "kv_proj" not in row for row in llm.params["rows"])
    assert outputs[0] == outputs[1] and sizes == [4 * 48 * 4, 6 * 48 * 4]


def edit(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


SLIM = {"version": 1, "forms": ["k", "kv", "k"]}


BAD_FIELDS = {
    "no object": ["k"],
    "unknown keys": SLIM | {"w_kv": 1},
    "version": SLIM | {"version": 2},
    "no forms": {"version": 1},
    "too few forms": SLIM | {"forms": ["k"]},
    "unknown form": SLIM | {"forms": ["k", "kv", "z"]},
    "rotary": SLIM | {"forms": ["k", "kv", "x"]},
}


@pytest.mark.parametrize("value", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_bad_field_is_refused(slim, value):
    edit(slim, slim_attention=value)
    with pytest.raises(skv.UsageError):
        skv.from_pretrained(slim)


@pytest.mark.parametrize("row, shape", [(2, None), (0, (48, 47)), (1, (48, 48))])
def test_a_missing_misshapen_or_needless_kv_proj_is_named(slim, row, shape):
    tensors, name = load_file(slim / "model.safetensors"), f"model.layers.{row}.self_attn.kv_proj.weight"
    tensors.pop(name, None)
    tensors |= {name: np.zeros(shape, np.float32)} if shape else {}
    save_file(tensors, slim / "model.safetensors", {"format": "pt"})
    with pytest.raises(skv.UsageError, match=name):
        skv.from_pretrained(slim)


def test_weights_beyond_float16_are_refused(plain, tmp_path):
    """Values so much larger than keys that W_KV overflows: on conversion, on saving, on loading."""
    theirs = hf_models.build("llama", seed=3, **FIELDS)
    with torch.no_grad():
        theirs.model.layers[1].self_attn.k_proj.weight.mul_(1e-5)
    folder = hf_models.save(theirs, tmp_path / "plain")
    with pytest.raises(skv.UsageError, match="layer 1"):
        skv.to_slim(*skv.from_pretrained(folder, dtype="float16"))
    slim = skv.to_slim(*skv.from_pretrained(folder))
    with pytest.raises(skv.UsageError, match=r"layers.1.self_attn.kv_proj"):
        skv.save_pretrained(tmp_path / "half", *slim, dtype="float16")
    skv.save_pretrained(tmp_path / "slim", *slim)
    with pytest.raises(skv.UsageError, match=r"layers.1.self_attn.kv_proj"):
        skv.from_pretrained(tmp_path / "slim", dtype="float16")


def test_singular_keys_are_named(tmp_path):
    theirs = hf_models.build("llama", seed=3, **FIELDS)
    with torch.no_grad():
        theirs.model.layers[2].self_attn.k_proj.weight[5] = theirs.model.layers[2].self_attn.k_proj.weight[4]
    with pytest.raises(skv.UsageError, match=r"^layer 2: W_K is singular \(condition .*\), so values"):
        skv.to_slim(*skv.from_pretrained(hf_models.save(theirs, tmp_path)))


def test_conversion_comes_last(slim):
    model, params = skv.from_pretrained(slim)
    with pytest.raises(skv.UsageError, match="convert last"):
        skv.to_swiftkv(model, params, skv.KVPlan.swiftkv(3, 1))
    with pytest.raises(skv.UsageError, match="to_slim converts rows of keys and values, not of k, kv"):
        skv.to_slim(model, params)
