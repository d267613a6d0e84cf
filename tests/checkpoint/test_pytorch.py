"""A student's export in transformers, by the PyTorch file that it carries: our logits and our tokens."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from tiny_models import SIZES, tiny
from tokenizers_made import make_tokenizer
from transformers import AutoModelForCausalLM, dynamic_module_utils

import swiftkv_jax as skv
from swiftkv_jax.checkpoint.names import slots
from swiftkv_jax.checkpoint.write import MODELLING, NOT_CODED
from swiftkv_jax.common.errors import UsageWarning
from swiftkv_jax.config.families import FAMILIES
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import RopeConfig

LAYERS, SPLIT, NEW = 5, 2, 16
FULL = 2**30
LLAMA3 = RopeConfig(
    rope_theta=5e5, rope_type="llama3", factor=8.0, original_max_position_embeddings=16, high_freq_factor=4.0
)
BASE = SIZES | {"num_layers": LAYERS, "max_position_embeddings": 128}
# hidden_size is 48 in 4 heads: a head_dim of 20 is not their quotient. Windows of 7 are shorter than prompts,
# and qwen3's begin inside the first group of two layers.
CONFIGS = {
    "llama": ModelConfig(
        **BASE, num_kv_heads=2, head_dim=20, qkv_bias=True, o_bias=True, mlp_bias=True, rope=LLAMA3
    ),
    "llama tied": ModelConfig(**BASE, num_kv_heads=4, head_dim=12, tie_word_embeddings=True),
    "mistral": ModelConfig(**BASE, family="mistral", num_kv_heads=1, head_dim=20, windows=(7,) * LAYERS),
    "qwen2": ModelConfig(
        **BASE, family="qwen2", num_kv_heads=2, head_dim=12, qkv_bias=True, tie_word_embeddings=True
    ),
    "qwen3": ModelConfig(
        **BASE, family="qwen3", num_kv_heads=1, head_dim=20, qk_norm=True, windows=(FULL, FULL, FULL, 7, 7)
    ),
}
# Families as `hf_models` has them: one group of three layers reads a row, of several kinds where they differ.
OTHERS = (
    "gemma", "gemma2", "gemma3", "ministral3", "smollm3", "granite", "olmo2", "olmo3", "seed_oss_out_bias",
    "glm4", "exaone4", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe",
    "deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "glm4_moe_lite",
)  # fmt: skip
CASES = [("qwen3", 1), *((name, 2) for name in CONFIGS), *((name, 3) for name in OTHERS)]
# Whose code reads a cache in different ways; the others' logits say enough.
GENERATED = [
    *CASES[:6],
    *((n, 3) for n in ("gemma3", "smollm3", "gemma2", "phi3", "qwen2_moe", "deepseek_v3")),
]
LENGTHS = (21, 5, 12)


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """Set the folder in which transformers keeps the code that it runs."""
    cache, before = str(tmp_path_factory.mktemp("modules")), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", cache)
        patch.setattr(sys, "path", list(sys.path))
        yield
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def student(name: str, share: int, tail: int = 0):
    """(model, params); each case has weights of its own."""
    config = CONFIGS[name] if name in CONFIGS else other(name)
    plan = KVPlan.swiftkv(config.num_layers, config.num_layers - 3, share, tail=tail)
    return tiny(config, plan.stored_as(config.form), seed=len(name) + share)


def other(name: str) -> ModelConfig:
    """A config of `hf_models`, of four layers."""
    family, fields = hf_models.CASES[name]
    raw = transformers.AutoConfig.for_model(family, **(hf_models.BASE | fields)).to_dict()
    return ModelConfig.from_hf(raw)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder of a case, written once."""
    home, done = tmp_path_factory.mktemp("exports"), {}

    def folder(*case) -> Path:
        if case not in done:
            done[case] = home / "-".join(map(str, case)).replace(" ", "-")
            skv.save_pretrained(done[case], *student(*case))
            if case[0] in OTHERS:  # the default of some families is no token of so small a vocabulary
                raw = json.loads((done[case] / "config.json").read_text())
                (done[case] / "config.json").write_text(json.dumps(raw | {"pad_token_id": None}))
        return done[case]

    return folder


def load(folder: Path, **options):
    """Load a folder as a user does."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, SIZES["vocab_size"], length).tolist() for length in LENGTHS]


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Prompts as tokenizers pass them to `generate`, padded on the left."""
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def greedy(model, params, rows: list[list[int]]) -> list[list[int]]:
    """NEW tokens for each row, by `forward` on whole sequences."""
    apply = jax.jit(lambda ids: model.apply({"params": params}, ids))
    ids = np.zeros((len(rows), max(map(len, rows)) + NEW), np.int32)
    for row, prompt in zip(ids, rows, strict=True):
        row[: len(prompt)] = prompt
    ends = np.array(list(map(len, rows)))
    every = np.arange(len(rows))
    for _ in range(NEW):
        ids[every, ends] = np.asarray(apply(ids))[every, ends - 1].argmax(-1)
        ends += 1
    return [row[end - NEW : end].tolist() for row, end in zip(ids, ends, strict=True)]


def generated(theirs, rows: list[list[int]], **options) -> list[list[int]]:
    given = padded(rows)
    theirs.generation_config.eos_token_id = None  # random tokens may be anybody's end of text
    out = theirs.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)
    return out[:, given["input_ids"].shape[1] :].tolist()


@pytest.mark.slow(*(f"{name}-3" for name in ("gemma", "granite", "olmo2", "glm4", "qwen2_moe", "olmoe")))
@pytest.mark.parametrize("name, share", CASES)
def test_logits_are_ours_and_every_tensor_has_its_place(name, share, exported):
    """The logits of every token are compared, and those of the last alone."""
    model, params = student(name, share)
    theirs, info = load(exported(name, share), output_loading_info=True)
    assert not any(info.values()), info
    ids = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (2, 40))
    want = np.asarray(jax.jit(model.apply)({"params": params}, jnp.array(ids)))
    assert np.ptp(want, axis=-1).min() > 1
    for attention in ("eager", "sdpa")[: 1 + theirs._supports_sdpa]:
        theirs.set_attn_implementation(attention)
        with torch.no_grad():
            np.testing.assert_allclose(theirs(torch.tensor(ids)).logits, want, atol=1e-4)
            last = theirs(torch.tensor(ids), logits_to_keep=1).logits
        np.testing.assert_allclose(last, want[:, -1:], atol=1e-4)


@pytest.mark.slow(*(f"{name}-{share}" for name, share in GENERATED[8:]))
@pytest.mark.parametrize("name, share", GENERATED)
def test_a_ragged_batch_generates_our_greedy_tokens(name, share, exported):
    want = greedy(*student(name, share), prompts())
    theirs = load(exported(name, share))
    assert generated(theirs, prompts()) == want
    assert generated(theirs, prompts(), use_cache=False) == want


@pytest.mark.slow("qwen3-1")
@pytest.mark.parametrize("name, share", [("llama", 2), ("qwen3", 1)])
def test_generated_tokens_are_those_of_our_engine(name, share, exported):
    folder = exported(name, share)
    with pytest.warns(UsageWarning):
        llm = skv.LLM(folder, num_pages=24, max_num_seqs=4, max_num_batched_tokens=64)
    outputs = llm.generate(prompts(), skv.SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True))
    assert generated(load(folder), prompts()) == [list(output.outputs[0].token_ids) for output in outputs]


TAILED = ("llama", "qwen3", "gemma3", "olmo2", "phi3", "qwen3_moe")


@pytest.mark.slow(*TAILED[2:])
@pytest.mark.parametrize("name", TAILED)
def test_with_a_tail_pytorch_generates_the_tokens_of_our_engine(name, exported):
    """The tail is longer than a prompt, as long as one, and shorter."""
    model, params = student(name, 1, 5)
    read, same = skv.from_pretrained(exported(name, 1, 5))
    assert read.plan == model.plan
    jax.tree.map(np.testing.assert_array_equal, same, params)
    theirs, info = load(exported(name, 1, 5), output_loading_info=True)
    assert not any(info.values()), info
    llm = skv.LLM.from_model(model, params, num_pages=24, max_num_seqs=4, max_num_batched_tokens=64)
    rows = [*prompts(), prompts()[0][:2]]
    outputs = llm.generate(rows, skv.SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True))
    ours = [list(output.outputs[0].token_ids) for output in outputs]
    for attention in ("eager", "sdpa")[: 1 + theirs._supports_sdpa]:
        theirs.set_attn_implementation(attention)
        assert generated(theirs, rows) == ours
        assert [generated(theirs, [row])[0] for row in rows] == ours


def test_a_static_cache_generates_the_same(exported):
    theirs = load(exported("llama", 2))
    same = generated(theirs, prompts())
    static = {"cache_implementation": "static", "disable_compile": True}
    assert generated(theirs, prompts(), **static) == same
    # Without padding transformers makes no mask, and the cache has room for more tokens than the prompt's.
    assert [generated(theirs, [prompt], **static)[0] for prompt in prompts()] == same


def test_only_the_last_prompt_token_runs_the_later_layers(exported):
    theirs, seen = load(exported("llama", 2)), []
    for layer in theirs.model.layers:
        layer.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[1]))
    generated(theirs, [prompts()[0]])
    assert seen[:LAYERS] == [LENGTHS[0]] * SPLIT + [1] * (LAYERS - SPLIT)
    seen.clear()
    with torch.no_grad():
        theirs(torch.tensor([prompts()[0]]))
    assert seen == [LENGTHS[0]] * LAYERS


@pytest.mark.parametrize(
    "name, share, held",
    [("llama", 1, [0, 1, 2, 3, 4]), ("llama", 2, [0, 1, 2, 4]), ("qwen3", 2, [0, 1, 2, 3, 4])],
)
def test_layers_of_an_acrosskv_group_share_one_cache_entry_in_pytorch(name, share, held, exported):
    """qwen3's first group has a layer with a window and one without, which keep different tokens."""
    theirs = load(exported(name, share))
    with torch.no_grad():
        cache = theirs(torch.tensor([prompts()[0]]))[hf_models.CACHE]
    assert [i for i, layer in enumerate(cache.layers) if layer.is_initialized] == held


def test_files_saved_by_pytorch_are_read_and_load_again(exported, tmp_path):
    folder = exported("qwen2", 2)
    load(folder).save_pretrained(tmp_path)
    model, params = skv.from_pretrained(folder)
    again, read = skv.from_pretrained(tmp_path)
    assert (again.plan, again.config) == (model.plan, model.config)
    jax.tree.map(np.testing.assert_array_equal, read, params)
    assert type(load(tmp_path)).__name__ == "Qwen2SwiftKVForCausalLM"


@pytest.mark.parametrize("exit_head, form", [(True, "kv"), (False, "k")])
def test_an_exit_head_and_rows_of_keys_alone_are_left_out(exit_head, form, tmp_path):
    """PyTorch has neither; the values of such rows come from v_proj, as with `slim=False`."""
    config = dataclasses.replace(CONFIGS["llama tied"], exit_head=exit_head)
    skv.save_pretrained(tmp_path, *tiny(config, KVPlan.swiftkv(LAYERS, SPLIT, 2).stored_as(form)))
    model, params = skv.from_pretrained(tmp_path, slim=False)
    theirs, info = load(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    ids = np.array([prompts()[0]])
    with torch.no_grad():
        got = theirs(torch.tensor(ids)).logits
    want = jax.jit(model.apply)({"params": params}, jnp.array(ids))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_students_of_every_family_are_tested_here_or_saved_with_a_warning():
    here = {config.family for config in CONFIGS.values()} | {hf_models.CASES[name][0] for name in OTHERS}
    students = {name for name, family in FAMILIES.items() if not family.encoder}
    assert here.isdisjoint(NOT_CODED) and here | set(NOT_CODED) == students


def test_only_a_students_folder_carries_code(tmp_path):
    plain, split = (tiny(CONFIGS["llama tied"], plan) for plan in (KVPlan.standard(5), KVPlan.swiftkv(5, 2)))
    skv.save_pretrained(tmp_path, *split)
    assert (tmp_path / MODELLING).is_file()
    skv.save_pretrained(tmp_path, *plain)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    raw = json.loads((tmp_path / "config.json").read_text())
    assert not raw.keys() & {"auto_map", "transformers_weights"}


def test_an_export_loads_without_warnings_and_its_code_is_never_run(exported, tmp_path):
    """The file may hold anything; earlier exports, which had none, are read too."""
    model, params = student("llama", 1)
    skv.save_pretrained(make_tokenizer(tmp_path), model, params)
    (tmp_path / MODELLING).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    again, read = skv.from_pretrained(tmp_path)
    skv.LLM(tmp_path, num_pages=8, max_num_seqs=1)
    assert not (tmp_path / "ran").exists()
    (tmp_path / MODELLING).unlink()
    raw = json.loads((tmp_path / "config.json").read_text())
    older = {name: raw[name] for name in raw.keys() - {"auto_map", "transformers_weights"}}
    (tmp_path / "config.json").write_text(json.dumps(older))
    oldest, also = skv.from_pretrained(tmp_path)
    assert again.plan == oldest.plan == model.plan and again.config == oldest.config
    for tree in (read, also):
        jax.tree.map(np.testing.assert_array_equal, tree, params)
    others = older | {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    with pytest.warns(UsageWarning, match="auto_map"):
        ModelConfig.from_hf(others)


def arctic_inference(config: ModelConfig, split: int) -> dict[str, tuple[int, ...]]:
    """Tensors that its `LlamaSwiftKVForCausalLM` has, by the names under which it reads them.

    From arctic_inference/vllm/swiftkv/llama_swiftkv.py of 2026-06-29. `qkv_proj`, `gate_up_proj` and
    `kv_proj_swiftkv` are read from separate tensors. Attention of later layers is a subclass of vLLM's and
    keeps its `qkv_proj`, which nothing there uses.
    """
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    out = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), "lm_head.weight": (v, d)}
    out["model.norm_swiftkv.weight"] = (d,)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        out |= {f"{at}.{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")}
        out |= {f"{at}.mlp.gate_proj.weight": (f, d), f"{at}.mlp.up_proj.weight": (f, d)}
        out |= {f"{at}.mlp.down_proj.weight": (d, f), f"{at}.self_attn.o_proj.weight": (d, q)}
        for suffix in ("", "_swiftkv") if layer >= split else ("",):
            for name, width in (("q", q), ("k", kv), ("v", kv)):
                out[f"{at}.self_attn.{name}_proj{suffix}.weight"] = (width, d)
    return out


def test_names_and_shapes_are_those_of_arctic_inference(tmp_path):
    """But for the projections that SwiftKV replaces, which its class holds unused: we do not write them."""
    config = dataclasses.replace(CONFIGS["llama tied"], tie_word_embeddings=False)
    skv.save_pretrained(tmp_path, *tiny(config, KVPlan.swiftkv(LAYERS, SPLIT)))
    theirs = arctic_inference(config, SPLIT)
    unused = {
        f"model.layers.{layer}.self_attn.{name}_proj.weight"
        for layer in range(SPLIT, LAYERS)
        for name in ("q", "k", "v")
    }
    assert unused <= theirs.keys()
    ours = {name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert ours == {name: theirs[name] for name in theirs.keys() - unused}
    published = (
        Path(__file__).parents[1] / "published_configs" / "Snowflake--Llama-3.1-SwiftKV-8B-Instruct.json"
    )
    real = ModelConfig.from_hf(published)
    large = {name: slot.shape for name, slot in slots(real, KVPlan.swiftkv(32, 16)).items()}
    assert large.items() <= arctic_inference(real, 16).items()


PROGRAM = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=True)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
given = tokenizer(["the cat sat on the mat", "the dog"], return_tensors="pt", padding=True)
model.generation_config.eos_token_id = None
out = model.generate(**given, max_new_tokens=8, do_sample=False)
print(json.dumps(out[:, given.input_ids.shape[1] :].tolist()))
assert not any(name.startswith(("jax", "swiftkv_jax")) for name in sys.modules)
"""


@pytest.mark.slow
def test_another_program_in_an_empty_folder_generates_from_texts(tmp_path):
    """The program has transformers alone: nothing of this library is on its path."""
    config = dataclasses.replace(CONFIGS["qwen3"], vocab_size=300)
    model, params = tiny(config, KVPlan.swiftkv(LAYERS, SPLIT, 2))
    skv.save_pretrained(make_tokenizer(tmp_path / "export"), model, params)
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "export")],
        cwd=tmp_path / "empty",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    llm = skv.LLM(tmp_path / "export", num_pages=24, max_num_seqs=2)
    settings = skv.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(["the cat sat on the mat", "the dog"], settings)
    assert json.loads(done.stdout) == [list(output.outputs[0].token_ids) for output in outputs]
