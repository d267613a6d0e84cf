"""KV prediction as a folder: an adapter that names its base, read back bit for bit, or refused."""

import functools
import json
import re
import shutil

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers_made import make_tokenizer

from swiftkv_jax.checkpoint.adapter import fingerprint, from_pretrained, save_pretrained
from swiftkv_jax.checkpoint.generation import read_generation_config
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import Prediction
from swiftkv_jax.core import predict, surgery
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.text.tokenizer import load_tokenizer

READS = (0, 0, 1, 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, model, params): base/ and adapter/ in the folder; the auxiliary is half the base's layers."""
    folder = tmp_path_factory.mktemp("pair")
    base = hf_models.build("qwen3", vocab_size=304, head_dim=20)
    make_tokenizer(hf_models.save(base, folder / "base"))
    model, params = from_pretrained(folder / "base")
    auxiliary, kept = surgery.layer_pruned(model, params, (0, 2))
    whole = Predicted(model, auxiliary, Prediction(READS))
    parts = {"base": params, "auxiliary": kept, "predictor": predict.uniform(whole, jax.random.key(0))}
    save_pretrained(folder / "adapter", whole, parts)
    return folder, whole, parts


@pytest.fixture
def copy(made, tmp_path):
    """A copy of the adapter alone, to be spoilt."""
    return shutil.copytree(made[0] / "adapter", tmp_path / "copy")


@pytest.mark.parametrize("cuts", [(), None], ids=["training", "serving"])
def test_a_saved_adapter_reads_back_unchanged(made, cuts):
    folder, model, params = made
    again, tree = from_pretrained(folder / "adapter", cuts=cuts)
    assert again == model
    want = params if cuts is not None else predict.split_layers(model, params)
    assert jax.tree.structure(tree) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, tree, want)


def test_the_files_are_those_described(made):
    """Maps in torch's layout, a folder that transformers loads, nothing of the base but its tokenizer."""
    folder, model, params = made
    names = {path.name for path in (folder / "adapter").iterdir()}
    assert {"auxiliary", "kv_prediction.json", "predictor.safetensors", "tokenizer.json"} <= names
    assert not any(name.startswith(("model", "config")) for name in names)
    tensors = load_file(folder / "adapter" / "predictor.safetensors")
    assert set(tensors) == {
        f"rows.{r}.{n}.{part}" for r in range(4) for n in "kv" for part in ("weight", "bias")
    }
    kernel = params["predictor"]["rows"][0]["v_proj"]["kernel"][2]
    np.testing.assert_array_equal(tensors["rows.2.v.weight"], np.asarray(kernel).T)
    said = json.loads((folder / "adapter" / "kv_prediction.json").read_text())
    assert said["base"] == str(folder / "base") and said["reads"] == [0, 0, 1, 1] and said["tail"] == 1
    theirs = hf_models.load(folder / "adapter" / "auxiliary")
    tokens = hf_models.tokens(9)
    ours = jax.jit(model.auxiliary.apply)({"params": params["auxiliary"]}, tokens)
    np.testing.assert_allclose(ours, hf_models.torch_logits(theirs, tokens), rtol=0, atol=1e-4)


def test_an_engine_serves_the_folder_as_it_serves_the_model(made):
    folder, model, params = made
    sizes = {"max_num_seqs": 2, "max_model_len": 32, "page_size": 8, "num_pages": 12}
    prompts = [[5, 9, 200, 31, 7, 8, 2, 250, 3], [17]]
    one, other = LLM.from_model(model, params, **sizes), LLM(folder / "adapter", **sizes)
    assert other.tokenizer is not None and one.fingerprint == other.fingerprint
    got = [[o.outputs[0].token_ids for o in llm.generate(prompts, use_tqdm=False)] for llm in (one, other)]
    assert got[0] == got[1]


def test_a_base_that_moved_is_found_where_the_caller_says(made, tmp_path):
    folder, model, _ = made
    home = shutil.copytree(folder, tmp_path / "there")
    said = json.loads((home / "adapter" / "kv_prediction.json").read_text())
    (home / "adapter" / "kv_prediction.json").write_text(json.dumps(said | {"base": "/gone/away"}))
    with pytest.raises(UsageError, match="--base"):
        from_pretrained(home / "adapter")
    assert from_pretrained(home / "adapter", base=home / "base")[0] == model
    (home / "adapter" / "kv_prediction.json").write_text(json.dumps(said | {"base": "../base"}))
    assert from_pretrained(home / "adapter")[0] == model


def test_a_plain_model_replaces_an_adapter_and_an_adapter_a_plain_model(made, tmp_path):
    folder, model, params = made
    for _ in range(2):
        save_pretrained(tmp_path / "out", model, params, base=folder / "base")
        assert from_pretrained(tmp_path / "out")[0] == model
        save_pretrained(tmp_path / "out", model.base, params["base"])
        assert isinstance(from_pretrained(tmp_path / "out")[0], Transformer)
        assert not (tmp_path / "out" / "auxiliary").exists()


def test_an_adapter_has_the_end_of_sequence_ids_of_its_base(made, tmp_path):
    """The base has the ids in config.json alone; adapters have no such file."""
    folder, model, params = made
    base = shutil.copytree(folder / "base", tmp_path / "base")
    said = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(said | {"eos_token_id": [0, 7]}))
    (base / "generation_config.json").write_text('{"temperature": 0.5}')
    save_pretrained(tmp_path / "out", model, params, base=base)
    found = read_generation_config(tmp_path / "out")
    assert found == read_generation_config(base) and found.eos_token_ids == (0, 7)


def test_another_base_is_refused(made, tmp_path):
    folder, _, _ = made
    hf_models.save(hf_models.build("qwen3", seed=1, vocab_size=304, head_dim=20), tmp_path / "other")
    with pytest.raises(UsageError, match="is not the model that"):
        from_pretrained(folder / "adapter", base=tmp_path / "other")


def with_config(made, tmp_path, **changes):
    """A base of the same weights with other fields of config.json."""
    base = shutil.copytree(made[0] / "base", tmp_path / "changed")
    spoil(base / "config.json", **changes)
    return base


NUMBERS = {
    "theta": {"rope_parameters": None, "rope_theta": 5e5},
    "scaling": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "eps": {"rms_norm_eps": 1e-3},
    "window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2, "layer_types": None},
    "context": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("changes", NUMBERS.values(), ids=NUMBERS)
def test_a_base_of_the_same_weights_that_computes_other_numbers_is_refused(made, tmp_path, changes):
    with pytest.raises(UsageError, match="is not the model that"):
        from_pretrained(made[0] / "adapter", base=with_config(made, tmp_path, **changes))


def test_heads_cut_otherwise_make_another_fingerprint(made, tmp_path):
    """8 heads of 10 numbers have projections of the same shapes as 4 of 20."""
    before = fingerprint(made[0] / "base")
    base = with_config(made, tmp_path, num_attention_heads=8, num_key_value_heads=4, head_dim=10)
    assert fingerprint(base) != before and fingerprint(base, 1) == fingerprint(made[0] / "base", 1)


def test_a_base_whose_config_is_only_spelled_otherwise_is_the_same(made, tmp_path):
    """As published, not as transformers 5 writes it; of another dtype, and with a longer context."""
    changes = {"rope_parameters": None, "rope_theta": 1e4, "torch_dtype": "bfloat16", "dtype": None}
    base = with_config(made, tmp_path, **changes, max_position_embeddings=256, use_cache=False)
    assert from_pretrained(made[0] / "adapter", base=base)[0].base.config.max_position_embeddings == 256


def test_an_adapter_of_format_1_is_read_by_the_check_that_it_was_written_for(made, copy, tmp_path):
    """Its fingerprint is of the base's tensors alone."""
    spoil(copy / "kv_prediction.json", format=1, base_fingerprint=fingerprint(made[0] / "base", 1))
    assert from_pretrained(copy)[0] == made[1]
    assert from_pretrained(copy, base=with_config(made, tmp_path, rms_norm_eps=1e-3))
    spoil(copy / "kv_prediction.json", base_fingerprint=fingerprint(made[0] / "base"))
    with pytest.raises(UsageError, match="is not the model that"):
        from_pretrained(copy)


def test_the_fingerprints_of_both_formats_stay_what_they_were(made, tmp_path):
    """Of a model whose numbers are these on every machine: folders that were written must be found again."""
    model, params = made[1].base, jax.tree.map(jnp.zeros_like, made[2]["base"])
    save_pretrained(tmp_path / "zeros", model, params)
    assert [fingerprint(tmp_path / "zeros", version) for version in (1, 2)] == [
        "107567d2143c740f",
        "a184b010223559a9",
    ]


def test_an_auxiliary_of_another_tokenizer_is_refused(copy):
    make_tokenizer(copy / "auxiliary", bos=False)
    with pytest.raises(UsageError, match="have different tokenizers"):
        from_pretrained(copy)


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 24])
def test_vocabularies_of_one_tokenizer_may_be_padded_to_other_sizes(made, tmp_path, padding):
    """As Qwen2.5's are, 151936 and 152064: with the auxiliary's below the base's 304, and above it."""
    folder, model, params = made
    count = load_tokenizer(folder / "base").vocab_size
    small = hf_models.build("qwen3", seed=2, vocab_size=count + padding, num_hidden_layers=2)
    make_tokenizer(hf_models.save(small, tmp_path / "small"))
    auxiliary, its = from_pretrained(tmp_path / "small")
    assert auxiliary.config.vocab_size != model.base.config.vocab_size
    whole = Predicted(model.base, auxiliary, Prediction(READS))
    predictor = predict.uniform(whole, jax.random.key(1))
    parts = {"base": params["base"], "auxiliary": its, "predictor": predictor}
    save_pretrained(tmp_path / "out", whole, parts)
    again, tree = from_pretrained(tmp_path / "out")
    assert again == whole
    tokens = jnp.asarray(hf_models.tokens(9) % count)
    run = jax.jit(functools.partial(predict.forward, whole))
    got, want = (run(p, tokens) for p in (tree, parts))
    np.testing.assert_array_equal(got, want)


def spoil(path, **changes):
    """An adapter's JSON, or its tensors, with some entries changed; None takes one away."""
    json_file = path.suffix == ".json"
    found = (json.loads(path.read_text()) if json_file else load_file(path)) | changes
    found = {name: value for name, value in found.items() if value is not None}
    path.write_text(json.dumps(found)) if json_file else save_file(found, path)


SPOILT = [  # what is changed, by its name: each refusal says it
    *(
        {"format": 3},
        {"reads": [0, 1]},
        {"reads": [0, 0, 1, 2]},
        {"reads": [0, 0, 1, True]},
        {"reads": "0011"},
    ),
    *({"tail": 0}, {"tail": None}, {"base": 7}),
    *({"rows.1.k.bias": None}, {"rows.4.k.bias": np.zeros(40, np.float32)}),
    {"rows.0.v.weight": np.zeros((40, 39), np.float32)},
    {"rows.3.v.bias": np.full(40, np.nan, np.float32)},
]


@pytest.mark.parametrize("changes", SPOILT)
def test_a_description_or_tensors_that_make_no_sense_are_refused_by_name(copy, changes):
    (name,) = changes
    spoil(copy / ("predictor.safetensors" if "." in name else "kv_prediction.json"), **changes)
    with pytest.raises(UsageError, match=re.escape(name)):
        from_pretrained(copy)
