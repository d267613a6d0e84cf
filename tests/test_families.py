"""Families beyond Llama's own kin: files come back bit for bit, served tokens are those of transformers, a
student serves what its definition says, and what cannot be is refused in one line."""

import contextlib
import functools
import shutil

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_engine as tiny
import torch
import transformers

import swiftkv_jax as skv
from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.loop import step
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.surgery import hadamard_inputs
from swiftkv_jax.engine.llm import LLM

UNCODED = ("olmo", "gpt2", "opt")  # families whose students have no PyTorch code
# Norms of every kind and place, learned positions, biases, experts.
UNTRAINED = ("gpt2", "olmo", "olmo2", "gemma2", "gemma3", "glm4", "exaone4", "qwen2_moe", "deepseek_v3")
# What differs while serving: windows, tables, scales by position, norms behind layers, experts, latents. One
# of each is run in chunks and lanes; tests/test_published_folders.py serves the other families.
SERVED = ("gemma2", "gpt2", "gemma3", "ministral3", "smollm3", "glm4", "mixtral", "qwen2_moe", "deepseek_v3")
LENGTHS = (1, 19, 3, 33, 8, 2)
SIZES = tiny.SIZES | {"max_model_len": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> a folder that transformers wrote."""

    @functools.cache
    def folder(name: str):
        return hf_models.save(hf_models.make(name), tmp_path_factory.mktemp(name))

    return folder


def prompts() -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(3, hf_models.BASE["vocab_size"], length).tolist() for length in LENGTHS]


def generated(folder) -> list[list[int]]:
    """Ten greedy tokens behind each prompt, by transformers."""
    theirs, out = hf_models.load(folder), []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=10,
                min_new_tokens=10,
                eos_token_id=None,
                pad_token_id=0,
            )
        out.append(whole[0, len(prompt) :].tolist())
    return out


def tensors(folder) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


def student_of(folder, split: int = 2, share: int = 1):
    model, params = from_pretrained(folder)
    plan = skv.KVPlan.swiftkv(model.config.num_layers, split, share)
    return skv.to_swiftkv(model, params, plan)


@pytest.mark.slow(*SERVED[1:])
@pytest.mark.parametrize("name", SERVED)
def test_served_greedy_tokens_are_those_that_transformers_generates(name, folders):
    """Ragged prompts, in chunks of 32 tokens, six of them in four lanes."""
    llm = LLM(folders(name), tokenizer=tiny.Bytes(), **SIZES)
    assert tiny.tokens(llm.generate(prompts(), tiny.GREEDY, use_tqdm=False)) == generated(folders(name))


@pytest.mark.slow(*SERVED[1:])
@pytest.mark.parametrize("name", SERVED)
def test_a_student_serves_what_its_definition_says(name, folders, tmp_path):
    """The student has shared rows, and is read again from its own folder."""
    student, params = student_of(folders(name), share=2)
    texts = prompts()[1:4]
    want = [tiny.greedy(student, params, prompt, 10) for prompt in texts]
    served = LLM.from_model(student, params, None, **SIZES)
    assert tiny.tokens(served.generate(texts, tiny.GREEDY, use_tqdm=False)) == want
    uncoded = student.config.family in UNCODED
    with pytest.warns(UsageWarning, match="no PyTorch code") if uncoded else contextlib.nullcontext():
        save_pretrained(tmp_path / "student", student, params)
    again, read = from_pretrained(tmp_path / "student")
    assert (again.config, again.plan) == (student.config, student.plan)
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.slow
def test_the_fused_fill_of_a_student_makes_the_same_rows(folders):
    student, params = student_of(folders("gemma_one_kv_head"))
    texts = prompts()[1:4]
    want = [tiny.greedy(student, params, prompt, 10) for prompt in texts]
    served = LLM.from_model(student, params, None, kernels="fill=xla", **SIZES)
    assert tiny.tokens(served.generate(texts, tiny.GREEDY, use_tqdm=False)) == want


# Case and form of its rows -> how far its logits may be from those with keys and values.
SLIM = {
    ("gemma", "k"): 1e-4,
    ("phi3", "k"): 1e-4,
    ("qwen2_yarn", "k"): 1e-4,  # queries and keys are longer by an attention factor
    ("gpt2", "k"): 1e-4,
    ("gpt2", "v"): 1e-4,
    ("opt", "x"): 1e-5,
}


@pytest.mark.slow("gemma-k", "gpt2-k", "gpt2-v", "phi3-k", "opt-x")
@pytest.mark.parametrize("name, form", SLIM)
def test_rows_of_another_form_give_the_same_logits_and_tokens(name, form, folders):
    model, params = from_pretrained(folders(name))
    slim, made = skv.to_slim(model, params, form)
    tokens = hf_models.tokens(40)
    models = (model, params), (slim, made), hadamard_inputs(slim, made)
    want, *found = (jax.jit(m.apply)({"params": p}, tokens) for m, p in models)
    for got in found:
        np.testing.assert_allclose(got, want, rtol=0, atol=SLIM[name, form])
    llm = LLM.from_model(slim, made, None, **SIZES)
    assert tiny.tokens(llm.generate(prompts(), tiny.GREEDY, use_tqdm=False)) == generated(folders(name))


# Case -> form of rows, what the one line must say.
REFUSED_FORMS = {
    "olmo_clipped": ("k", "clipped at 1.5, which nothing undoes"),
    "olmo2_multi_head": ("k", "keys are normed after their projection"),
    "phi3_partial": ("k", "only 12 of a key's 16 numbers turn"),
}


@pytest.mark.parametrize("name", REFUSED_FORMS)
def test_rows_that_make_no_sense_for_a_family_are_refused(name, folders):
    form, why = REFUSED_FORMS[name]
    with pytest.raises(UsageError, match=why):
        skv.to_slim(*from_pretrained(folders(name)), form)


@pytest.mark.parametrize("name", UNTRAINED)
def test_an_untrained_student_split_at_the_last_layer_is_its_teacher(name, folders):
    model, params = from_pretrained(folders(name))
    layers = model.config.num_layers
    student, own = skv.to_swiftkv(model, params, skv.KVPlan.swiftkv(layers, layers - 1), "fold")
    # A family without norms before its attention gives its rows none either.
    assert ("shared_norm" in own) == (model.config.norm_before and model.config.norm != "layer_plain")
    tokens = hf_models.tokens(24)
    want, got = (jax.jit(m.apply)({"params": p}, tokens) for m, p in ((model, params), (student, own)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 16, "patch_size": 8}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
_QWEN_VISION |= {"patch_size": 8, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
# Case -> (model_type, text_config, vision_config, the beginning of its text's tensor names).
WRAPPED = {
    "gemma3": (  # whose class for images has no soft cap of logits
        "gemma3",
        hf_models.CASES["gemma3"][1] | {"final_logit_softcapping": None},
        _VISION,
        "language_model.",
    ),
    "mistral3": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": 7, "head_dim": 20},
        _VISION | {"model_type": "pixtral"},
        "language_model.",
    ),
    "ministral3": (
        "mistral3",
        {"model_type": "ministral3"} | hf_models.CASES["ministral3"][1],
        _VISION | {"model_type": "pixtral"},
        "language_model.",
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {"head_dim": 16, "rope_scaling": _MROPE},
        _QWEN_VISION,
        "model.language_model.",
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_part_of_a_model_of_images_loads_and_keeps_its_names(name, tmp_path):
    kind, text, vision, prefix = WRAPPED[name]
    theirs = hf_models.wrapped(kind, text, vision)
    hf_models.save(theirs, tmp_path / "theirs")
    with pytest.warns(UsageWarning, match=f"{kind} reads images too; only its text model is loaded"):
        model, params = from_pretrained(tmp_path / "theirs")
    ids = hf_models.tokens()
    got = np.asarray(jax.jit(model.apply)({"params": params}, ids))
    np.testing.assert_allclose(got, hf_models.torch_logits(theirs, ids), rtol=0, atol=1e-4)

    save_pretrained(tmp_path / "ours", model, params)
    whole, own = tensors(tmp_path / "theirs"), tensors(tmp_path / "ours")
    assert own.keys() == {key for key in whole if key.startswith(prefix) or key == "lm_head.weight"}
    for key in own:
        np.testing.assert_array_equal(own[key], whole[key], err_msg=key)
    with pytest.warns(UsageWarning, match="only its text model"):
        again = skv.ModelConfig.from_hf(tmp_path / "ours")
    assert (again, again.wrapper) == (model.config, kind)

    # A student has no images to read: it is its text model's.
    plan = skv.KVPlan.swiftkv(model.config.num_layers, 2)
    save_pretrained(tmp_path / "student", *skv.to_swiftkv(model, params, plan))
    assert not any(key.startswith(prefix) for key in tensors(tmp_path / "student"))
    student, _ = from_pretrained(tmp_path / "student")
    assert (student.config, student.config.wrapper) == (model.config, None)


@pytest.mark.parametrize("text", [None, {"model_type": "llama4_text"}])
def test_a_file_without_a_text_part_that_is_read_is_refused(text):
    with pytest.raises(UsageError, match="only the text part of gemma3 is read, a text_config of"):
        skv.ModelConfig.from_hf({"model_type": "gemma3", "text_config": text, "vision_config": {}})


# Case, share: one row is read by layers of several tables, or equal layers read rows of several.
TABLES = [("smollm3", 2), ("gemma3", 3), ("exaone4", 3)]


@pytest.mark.slow("gemma3-3", "exaone4-3")
@pytest.mark.parametrize("name, share", TABLES)
def test_a_reader_turns_its_query_by_the_table_of_its_rows_maker(name, share, folders):
    """Scores then depend on distances alone, so that a text further on has the same logits."""
    student, params = student_of(folders(name), split=1, share=share)
    kinds, rows = student.config.kinds, range(len(student.plan.rows))
    assert any(len({kinds[layer].rope for layer in student.plan.readers(row)}) > 1 for row in rows)
    tokens = jnp.asarray(hf_models.tokens(40))
    at = jnp.broadcast_to(jnp.arange(40), tokens.shape)
    apply = jax.jit(lambda first: logits(student, params, forward(student, params, tokens, at + first)))
    near, far = np.asarray(apply(0)), np.asarray(apply(1000))
    np.testing.assert_allclose(far, near, rtol=0, atol=1e-3 * np.abs(near).max())
    np.testing.assert_allclose(stepped(student, params, tokens[0]), near[0, -1], rtol=0, atol=1e-4)


def stepped(model, params, tokens) -> np.ndarray:
    """Logits of the last token, from a cache filled in two chunks."""
    cache, out = Cache.dense(model.config, model.plan, 1, 64, jnp.float32), None
    run = jax.jit(step, static_argnums=0)
    for a, b in ((0, 7), (7, len(tokens))):
        where = jnp.arange(a, b), jnp.array([0, b - a]), jnp.array([b - a - 1])
        out, cache = run(model, params, tokens[a:b], *where, cache)
    return np.asarray(out)[0]


@pytest.mark.parametrize("name, prefix", [("gpt2", "transformer."), ("opt", "model.")])
def test_files_of_the_model_without_its_head_are_read_too(name, prefix, folders, tmp_path):
    """As the published GPT-2's, which holds masks as well."""
    held = {key.removeprefix(prefix): value for key, value in tensors(folders(name)).items()}
    assert all(not key.startswith(prefix) for key in held)
    if name == "gpt2":
        held |= {f"h.{i}.attn.bias": np.ones((1, 1, 4, 4), np.float32) for i in range(4)}
    shutil.copy(folders(name) / "config.json", tmp_path)
    safetensors.numpy.save_file(held, tmp_path / "model.safetensors")
    (_, want), (_, got) = from_pretrained(folders(name)), from_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_kernel_without_a_soft_cap_is_refused(folders):
    with pytest.raises(UsageError, match="native_cpu does not support a soft cap of scores: reference, xla"):
        LLM(folders("gemma2"), tokenizer=tiny.Bytes(), kernels="attention=native_cpu", **SIZES)


def test_prompts_skip_layers_that_read_earlier_rows_without_loss(tmp_path):
    """The row map of Gemma 3n and 4: the last layers read what the last of the earlier layers with the same
    window made. Prompt tokens stop before them, and greedy tokens are those of the whole model."""
    local, every = "sliding_attention", "full_attention"
    kinds = [local, local, every, local, every, local, local, every, local]
    said = transformers.Gemma3nTextConfig(num_hidden_layers=9, num_kv_shared_layers=4, layer_types=kinds)
    assert said.kv_sharing_modes == [None] * 3 + ["store"] * 2 + ["reuse"] * 4
    fields = hf_models.GEMMA | {"rope_parameters": hf_models.TWO_TABLES, "layer_types": kinds}
    theirs = hf_models.build("gemma3_text", num_hidden_layers=9, **fields)
    rows, made = [0, 1, 2, 3, 4, 3, 3, 4, 3], {}
    for layer, row in enumerate(rows):
        reader, maker = (theirs.model.layers[i].self_attn for i in (layer, row))
        for name in ("k_proj", "v_proj", "k_norm"):
            getattr(reader, name).load_state_dict(getattr(maker, name).state_dict())
        for name in ("k_proj", "v_proj"):  # a reader gets what its maker's projection gave

            def shared(module, given, out, at=(row, name), own=layer == row):
                if own:
                    made[at] = out
                return made[at]

            getattr(reader, name).register_forward_hook(shared)
    model, params = from_pretrained(hf_models.save(theirs, tmp_path))
    plan = skv.KVPlan.from_rows(rows)
    assert plan.depth == 4
    llm = LLM.from_model(*skv.to_swiftkv(model, params, plan), tiny.Bytes(), **SIZES)
    got = tiny.tokens(llm.generate(prompts(), tiny.GREEDY, use_tqdm=False))
    for prompt, tokens in zip(prompts(), got, strict=True):
        with torch.no_grad():
            whole = theirs(torch.tensor([prompt + tokens]), use_cache=False).logits[0].argmax(-1)
        assert tokens == whole[len(prompt) - 1 : -1].tolist()
