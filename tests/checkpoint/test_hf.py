"""Hugging Face folders: what is read and written, bit for bit, and what is refused, in one clear line."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import hf_models
import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from processes_made import virtual_devices
from safetensors.numpy import load_file, save_file

from swiftkv_jax.checkpoint import write
from swiftkv_jax.checkpoint.generation import GenerationDefaults, read_generation_config
from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.checkpoint.names import slots
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer

LAYERS = 5
SIZES = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_layers": LAYERS, "num_heads": 4}
LLAMA = ModelConfig(**SIZES, num_kv_heads=2, head_dim=4)
QWEN3 = ModelConfig(
    **SIZES, family="qwen3", num_kv_heads=1, head_dim=6, qk_norm=True, tie_word_embeddings=True
)
QWEN2 = ModelConfig(**SIZES, family="qwen2", num_kv_heads=4, head_dim=4, qkv_bias=True)
INDEX = "model.safetensors.index.json"


def random_params(config: ModelConfig, plan: KVPlan, dtype="float32"):
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda w: random.standard_normal(w.shape).astype(dtype), weights.weights(config, plan)
    )


def saved(folder, config=LLAMA, plan=None, **options):
    """(model, params) after writing them to `folder`."""
    plan = plan or KVPlan.standard(LAYERS)
    model, params = Transformer(config, plan), random_params(config, plan)
    save_pretrained(folder, model, params, **options)
    return model, params


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def rewrite(folder, change):
    """Load model.safetensors, let `change` edit the dict of tensors, save it again."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


PLANS = {
    "standard": KVPlan.standard(LAYERS),
    "split3": KVPlan.swiftkv(LAYERS, 3),
    "split_last": KVPlan.swiftkv(LAYERS, LAYERS - 1),
    "ragged": KVPlan.swiftkv(LAYERS, 2, 2),
    "one_row": KVPlan.swiftkv(LAYERS, 1, 4),
}


@pytest.mark.parametrize(
    "config, plan",
    [(QWEN2, PLANS["standard"]), (LLAMA, PLANS["split_last"]), *((QWEN3, plan) for plan in PLANS.values())],
)
def test_round_trip_is_bit_exact(config, plan, tmp_path):
    model, params = saved(tmp_path / "out", config, plan)
    again, read = from_pretrained(tmp_path / "out")
    assert (again.plan, again.config) == (model.plan, model.config)
    assert_same(read, params)


def test_published_swiftkv_names_and_fields(tmp_path):
    """The names of the published SwiftKV checkpoints, written out: split 3, groups of 2 -> leader 3 only."""
    saved(tmp_path, QWEN3, KVPlan.swiftkv(LAYERS, 3, 2))
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == "qwen3_swiftkv" and raw["architectures"] == ["Qwen3SwiftKVForCausalLM"]
    assert (raw["swiftkv"], raw["num_key_value_layers"], raw["key_value_group_size"]) == (True, 3, 2)
    tensors = load_file(tmp_path / "model.safetensors")
    attention = {
        j: sorted(n.split("self_attn.")[1] for n in tensors if f"layers.{j}.self_attn" in n)
        for j in (2, 3, 4)
    }
    plain = [f"{name}.weight" for name in ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj")]
    q = ["o_proj.weight", "q_norm_swiftkv.weight", "q_proj_swiftkv.weight"]
    kv = ["k_norm_swiftkv.weight", "k_proj_swiftkv.weight", "v_proj_swiftkv.weight"]
    assert attention == {2: plain, 3: sorted(q + kv), 4: q}
    assert tensors["model.norm_swiftkv.weight"].shape == (16,)
    assert tensors["model.layers.3.self_attn.k_proj_swiftkv.weight"].shape == (6, 16)
    assert "lm_head.weight" not in tensors, "the head of a tied model is its embedding"


def test_dead_originals_buffers_and_tied_heads_are_ignored(tmp_path):
    """ArcticTraining's files hold the originals of what SwiftKV replaced; old ones rotary buffers too."""
    plan = KVPlan.swiftkv(LAYERS, 3, 2)
    _, params = saved(tmp_path, QWEN3, plan)

    def add(tensors):
        for j in (3, 4):
            for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"):
                tensors[f"model.layers.{j}.self_attn.{name}.weight"] = np.full((2, 2), np.nan, np.float32)
            tensors[f"model.layers.{j}.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
        tensors["lm_head.weight"] = np.full((37, 16), np.nan, np.float32)

    rewrite(tmp_path, add)
    assert_same(from_pretrained(tmp_path)[1], params)


def test_a_file_with_the_originals_takes_a_tail_by_one_field(tmp_path):
    """As ArcticTraining saves them, all of q, k and v: those of keys and values are the tail's."""
    _, params = saved(tmp_path, QWEN3, KVPlan.swiftkv(LAYERS, 3))
    _, theirs = saved(tmp_path / "teacher", QWEN3, KVPlan.standard(LAYERS))
    originals = load_file(tmp_path / "teacher" / "model.safetensors")
    rewrite(tmp_path, lambda tensors: tensors.update({n: originals[n] for n in originals.keys() - tensors}))
    raw = json.loads((tmp_path / "config.json").read_text())
    for tail in (0, 6):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"swiftkv_tail": tail}))
        read, got = from_pretrained(tmp_path)
        assert read.plan == KVPlan.swiftkv(LAYERS, 3, tail=tail)
        own = {"tail_rows": weights.recut(theirs["rows"], [range(3, LAYERS)])} if tail else {}
        assert_same(got, params | own)


@pytest.mark.parametrize(
    "disk, asked", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")]
)
def test_every_dtype_is_read_and_cast(disk, asked, tmp_path):
    _, params = saved(tmp_path, dtype=disk)
    model, read = from_pretrained(tmp_path, dtype=asked)
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
    assert model.dtype == asked and model.config.dtype == disk
    assert_same(read, jax.tree.map(lambda leaf: leaf.astype(kinds[disk]).astype(kinds[asked]), params))


@pytest.mark.parametrize(
    "dtype, said",
    [("bfloat16", {}), ("float16", {"dtype": "auto"}), ("float32", {"torch_dtype": "auto"})],
)
def test_a_config_without_a_dtype_leaves_it_to_the_weights(dtype, said, tmp_path):
    """Most of them: norms may be in another."""
    saved(tmp_path, dtype=dtype)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(raw | said))
    norm = {"model.norm.weight": np.ones(LLAMA.hidden_size, np.float32)}
    rewrite(tmp_path, lambda tensors: tensors.update(norm))
    model, params = from_pretrained(tmp_path)
    assert (model.dtype, model.config.dtype, str(params["embed"].dtype)) == (dtype,) * 3


def test_each_device_reads_its_shard_and_nothing_larger(tmp_path):
    """Over 8 devices: the same values, where sharding.py puts them, no read larger than a layer's shard."""
    sizes = SIZES | {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_heads": 8}
    saved(tmp_path, ModelConfig(**sizes, num_kv_heads=8, head_dim=4), PLANS["ragged"].stored_as("k"))
    script = Path(__file__).with_name("mesh_load.py")
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=script.parents[2], env=os.environ | {"PYTHONPATH": "."}
    )
    assert done.returncode == 0, done.stderr
    mlp = 32 * 64  # the largest tensor, over fsdp x tensor
    assert json.loads(done.stdout) == {
        "(1, 8, 1)": mlp // 8,
        "(2, 2, 2)": mlp // 4,
        "(1, 1, 8)": mlp // 8,
        "(8, 1, 1)": mlp,
    }


def test_sharded_files_have_an_index_and_read_back(tmp_path):
    _, params = saved(tmp_path / "ours", max_shard_bytes=9000)
    index = json.loads((tmp_path / "ours" / INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == 4 * weights.count(params)
    assert all((tmp_path / "ours" / name).stat().st_size < 9000 + 2000 for name in files)
    assert_same(from_pretrained(tmp_path / "ours")[1], params)
    theirs = hf_models.load(tmp_path / "ours")
    want = {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    assert {name: slot.shape for name, slot in slots(LLAMA, KVPlan.standard(LAYERS)).items()} == want

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="9KB")
    assert (tmp_path / "theirs" / INDEX).exists()
    assert_same(from_pretrained(tmp_path / "theirs")[1], params)


def test_saving_over_a_folder_leaves_no_old_weights(tmp_path):
    saved(tmp_path, max_shard_bytes=9000)
    (tmp_path / "notes.txt").write_text("the user's own")
    _, params = saved(tmp_path, QWEN2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "model.safetensors", "notes.txt"]
    assert_same(from_pretrained(tmp_path)[1], params)


def test_tokenizer_generation_config_and_token_ids_are_carried(tmp_path):
    source = tmp_path / "source"
    saved(source)
    edit_json(source / "config.json", eos_token_id=[5, 6], bos_token_id=None)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).write_text(json.dumps({"eos_token_id": 7}))
    (source / "README.md").write_text("not ours to copy")
    saved(tmp_path / "out", source=source)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    copied = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert names == {"config.json", "model.safetensors"} | copied
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["eos_token_id"] == [5, 6] and raw["bos_token_id"] is None
    saved(source, QWEN2, source=source)
    assert json.loads((source / "tokenizer.json").read_text()) == {"eos_token_id": 7}


def test_everything_that_does_not_fit_is_in_one_error(tmp_path):
    saved(tmp_path)

    def spoil(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.1.mlp.extra.weight"] = np.zeros(3, np.float32)
        tensors["model.layers.5.input_layernorm.weight"] = np.zeros(16, np.float32)
        tensors["model.layers.2.self_attn.k_proj.weight"] = np.zeros((16, 8), np.float32)
        tensors["model.layers.0.input_layernorm.weight"] = np.zeros(16, np.int8)

    rewrite(tmp_path, spoil)
    with pytest.raises(UsageError) as error:
        from_pretrained(tmp_path)
    text = str(error.value)
    assert "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight;" in text
    assert "2 unexpected: model.layers.1.mlp.extra.weight, model.layers.5.input_layernorm.weight;" in text
    assert "1 misshapen: model.layers.2.self_attn.k_proj.weight is [16, 8], not [8, 16];" in text
    assert text.endswith("1 not one of F32, BF16, F16: model.layers.0.input_layernorm.weight is I8")


def test_a_standard_model_keeps_its_originals_and_a_student_its_new_ones(tmp_path):
    """Optional tensors are optional only where SwiftKV replaced them."""
    saved(tmp_path / "student", plan=KVPlan.swiftkv(LAYERS, 3))
    rewrite(tmp_path / "student", lambda tensors: tensors.pop("model.layers.2.self_attn.q_proj.weight"))
    with pytest.raises(UsageError, match="self_attn"):
        from_pretrained(tmp_path / "student")
    saved(tmp_path / "teacher")
    edit_json(tmp_path / "teacher" / "config.json", model_type="llama_swiftkv", num_key_value_layers=3)
    with pytest.raises(UsageError, match="q_proj_swiftkv"):
        from_pretrained(tmp_path / "teacher")


@pytest.mark.parametrize("size", [0, 5, 300, -1])
def test_truncated_safetensors_names_the_file(size, tmp_path):
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UsageError, match=r"model\.safetensors is truncated or not safetensors"):
        from_pretrained(tmp_path)


def _drop_file(folder, index):
    (folder / sorted(set(index["weight_map"].values()))[1]).unlink()


def _point_elsewhere(name):
    def spoil(folder, index):
        index["weight_map"]["model.norm.weight"] = name

    return spoil


def _swap(folder, index):
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]


INDEX_FAULTS = {
    "file_missing": _drop_file,
    "wrong_file": _swap,
    "parent": _point_elsewhere("../model.safetensors"),
    "absolute": _point_elsewhere("/etc/model.safetensors"),
    "backslash": _point_elsewhere("..\\model.safetensors"),
    "pickle": _point_elsewhere("pytorch_model.bin"),
    "number": _point_elsewhere(3),
    "empty": lambda folder, index: index.pop("weight_map"),
}


@pytest.mark.parametrize("spoil", INDEX_FAULTS.values(), ids=INDEX_FAULTS)
def test_a_bad_index_is_refused(spoil, tmp_path):
    saved(tmp_path / "out", max_shard_bytes=9000)
    saved(tmp_path)  # a readable file where an escaping name would lead
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    spoil(tmp_path / "out", index)
    (tmp_path / "out" / INDEX).write_text(json.dumps(index))
    with pytest.raises(UsageError):
        from_pretrained(tmp_path / "out")


def test_only_safetensors_is_read(tmp_path):
    saved(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="pytorch_model"):
        from_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UsageError, match=r"model.safetensors"):
        from_pretrained(tmp_path)


def test_a_hub_id_is_fetched_once_and_without_pickles(tmp_path, monkeypatch):
    _, params = saved(tmp_path)
    asked = []

    def download(repo, revision, allow_patterns):
        asked.append((repo, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_same(from_pretrained("someone/some-model")[1], params)
    assert len(asked) == 1 and asked[0][0] == "someone/some-model"
    assert not any("bin" in pattern or pattern == "*" for pattern in asked[0][1])


@contextlib.contextmanager
def files_limited_to(size: int):
    """Writes beyond `size` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("there_before", [False, True])
def test_a_full_disk_leaves_nothing_half_written(there_before, tmp_path):
    out = tmp_path / "deep" / "out"
    if there_before:
        saved(out, QWEN2)
    before = {path.name: path.read_bytes() for path in out.glob("*")}
    with files_limited_to(7000), pytest.raises(UsageError, match="cannot write"):
        saved(out, max_shard_bytes=9000)
    assert {path.name: path.read_bytes() for path in out.glob("*")} == before
    assert [path.name for path in (tmp_path / "deep").iterdir()] == (["out"] if there_before else [])


def test_a_save_interrupted_between_files_keeps_the_old_config(tmp_path, monkeypatch):
    """config.json is the last file to change, and the staging folder goes whatever happens."""
    saved(tmp_path / "out", QWEN2)
    real, moved = os.replace, []

    def stop_at_config(source, target):
        if os.fspath(target).endswith("config.json"):
            raise KeyboardInterrupt
        moved.append(os.path.basename(target))
        real(source, target)

    monkeypatch.setattr(write.os, "replace", stop_at_config)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path / "out", LLAMA)
    assert moved == ["model.safetensors"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen2"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_without_a_published_form_is_refused_before_anything_is_written(tmp_path):
    for plan in (KVPlan.from_rows([0, 0, 1, 1, 2]), KVPlan.merge_all(LAYERS)):
        with pytest.raises(UsageError, match="num_key_value_layers"):
            saved(tmp_path / "out", plan=plan)
    model = Transformer(LLAMA, KVPlan.standard(LAYERS))
    params = random_params(LLAMA, KVPlan.swiftkv(LAYERS, 3))
    with pytest.raises(UsageError, match=r"not this model's parameters: .*shared_norm"):
        save_pretrained(tmp_path / "out", model, params)
    assert not list(tmp_path.iterdir())


def test_generation_defaults_of_a_published_file(tmp_path):
    """Llama-3.1-8B-Instruct's file: three ids end an answer."""
    file = {
        "bos_token_id": 128000,
        "do_sample": True,
        "eos_token_id": [128001, 128008, 128009],
        "temperature": 0.6,
        "top_p": 0.9,
        "transformers_version": "4.42.3",
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 9}))
    defaults = read_generation_config(tmp_path)
    assert defaults == GenerationDefaults(eos_token_ids=(128001, 128008, 128009), temperature=0.6, top_p=0.9)


def test_generation_defaults_from_config_json_alone_or_from_nothing(tmp_path):
    assert read_generation_config(tmp_path) == GenerationDefaults()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.1}))
    assert read_generation_config(tmp_path) == GenerationDefaults(eos_token_ids=(2,))


WRONG = [("eos_token_id", "x"), ("eos_token_id", [1, None]), ("eos_token_id", True), ("temperature", "hot")]


@pytest.mark.parametrize("field, value", [*WRONG, ("top_k", 1.5)])
def test_generation_config_of_wrong_types(field, value, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(UsageError, match=field):
        read_generation_config(tmp_path)


@pytest.mark.slow
def test_two_processes_save_a_model_that_lies_on_both(tmp_path):
    """Real multi-process JAX: no process holds all of it, and the folder is what one process would write."""
    import two_processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | virtual_devices(2) | {"JAX_PLATFORMS": "cpu"}
    script = Path(__file__).with_name("two_processes.py")
    command = [sys.executable, str(script), str(port)]
    runs = [
        subprocess.Popen(
            [*command, str(i), str(tmp_path / "both")], env=env, stderr=subprocess.PIPE, text=True
        )
        for i in (0, 1)
    ]
    errors = [run.communicate(timeout=240)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    model = Transformer(two_processes.CONFIG, two_processes.PLAN)
    save_pretrained(tmp_path / "one", model, jax.jit(two_processes.make)())
    both, one = (load_file(tmp_path / name / "model.safetensors") for name in ("both", "one"))
    assert both.keys() == one.keys()
    for name, want in one.items():
        np.testing.assert_array_equal(both[name], want, err_msg=name)
