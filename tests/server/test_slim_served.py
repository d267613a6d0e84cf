"""serve.py and a converted folder: as its rows say, as the plain model, both at once; and what is refused."""

import json
import shutil
from pathlib import Path

import hf_models
import numpy as np
import pytest
import transformers
from http_server import Running
from safetensors.numpy import load_file, save_file

import swiftkv_jax as skv
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.server.main import build_parser, main, make_api, server_settings

FLAGS = "--max-num-seqs 2 --max-num-batched-tokens 32 --max-model-len 64".split()
KV_PROJ = "model.layers.1.self_attn.kv_proj.weight"


@pytest.fixture(scope="module")
def slim(tmp_path_factory) -> Path:
    """A folder of a small multi-head model with rows of keys, and the demo's tokenizer."""
    theirs = hf_models.build("llama", seed=3, vocab_size=2048, num_hidden_layers=2, num_key_value_heads=4)
    plain = hf_models.save(theirs, tmp_path_factory.mktemp("plain"))
    transformers.AutoTokenizer.from_pretrained(DEMO / "tokenizer").save_pretrained(plain)
    folder = tmp_path_factory.mktemp("models") / "slim"
    skv.save_pretrained(folder, *skv.to_slim(*skv.from_pretrained(plain)))
    return folder


def test_one_folder_is_served_plain_and_as_its_rows_say(slim):
    """--slim off is of --model alone; what --compare names is served as it is."""
    flags = ["--http", ":0", "--model", str(slim), "--slim", "off", "--served-model-name", "plain"]
    args = build_parser().parse_args([*flags, "--compare", str(slim), *FLAGS])
    api = make_api(args, *server_settings(args, None))
    llms = {name: served.llm for name, served in api.models.by_name.items()}
    assert {name: llm.model.plan.forms for name, llm in llms.items()} == {"plain": ("kv",), "slim": ("k",)}
    assert [llm.cache_bytes_per_token for llm in llms.values()] == [768, 384]
    with Running(llms["plain"], {"slim": llms["slim"]}, "plain", warm_up=False) as server:
        asked = {"prompt": "The cache of keys", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        texts = [server.complete(**asked, model=name)["choices"][0]["text"] for name in llms]
    assert texts[0] == texts[1] and texts[0]


REFUSED = {
    "fill": (["--kernels", "fill=xla"], None, {}),
    "cudnn": (["--kernels", "chunk=cudnn"], None, {}),
    "--slim": (["--slim", "no"], None, {}),
    "w_kv": ([], {"version": 1, "forms": ["k", "k"], "w_kv": 1}, {}),
    "forms": ([], {"version": 1, "forms": ["k"]}, {}),
    KV_PROJ: ([], None, {KV_PROJ: None}),
    "kv_proj": ([], None, {KV_PROJ: np.zeros((48, 47), np.float32)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line_and_exit_code_2(name, slim, tmp_path, capsys):
    flags, described, changed = REFUSED[name]
    folder = shutil.copytree(slim, tmp_path / "spoilt")
    if described:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"slim_attention": described}))
    if changed:
        tensors = load_file(folder / "model.safetensors") | changed
        kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert main(["--model", str(folder), *FLAGS, *flags, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert name in err and err.startswith("error: ") and err.count("\n") == 1 and not out
