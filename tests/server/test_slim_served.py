"""serve.py and a converted folder: as its rows say, as the plain model, both at once; and what is refused."""

import json
import re
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


def test_one_folder_is_served_plain_and_as_its_rows_say(slim, capsys):
    """--slim off is of --model alone; what --compare names is served as it is."""
    flags = ["--http", ":0", "--model", str(slim), "--slim", "off", "--served-model-name", "plain"]
    args = build_parser().parse_args([*flags, "--compare", str(slim), *FLAGS])
    api = make_api(args, *server_settings(args, None))
    llms = {name: served.llm for name, served in api.models.by_name.items()}
    assert {name: llm.model.plan.forms for name, llm in llms.items()} == {"plain": ("kv",), "slim": ("k",)}
    said = capsys.readouterr().err
    assert "768 bytes per token in 2 rows;" in said and "384 bytes per token in 2 rows, 2 as k;" in said
    with Running(llms["plain"], {"slim": llms["slim"]}, "plain", warm_up=False) as server:
        asked = {"prompt": "The cache of keys", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answers = [server.http.post("/v1/completions", json=asked | {"model": name}) for name in llms]
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1] and texts[0]


def edited(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def without_kv_proj(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[KV_PROJ]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def with_narrow_kv_proj(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors") | {KV_PROJ: np.zeros((48, 47), np.float32)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


REFUSED = {
    "a fill": (
        None,
        ["--kernels", "fill=xla"],
        "of form kv; this one is standard with rows of form k: give None",
    ),
    "a kernel": (
        None,
        ["--kernels", "chunk=cudnn"],
        "k_cache_attention has no 'cudnn'; it has reference, xla",
    ),
    "--slim": (None, ["--slim", "no"], "--slim must be one of on, off, not 'no'"),
    "a field": (
        lambda folder: edited(folder, slim_attention={"version": 1, "forms": ["k", "k"], "w_kv": 1}),
        [],
        "unknown fields w_kv; known: version, forms",
    ),
    "forms": (
        lambda folder: edited(folder, slim_attention={"version": 1, "forms": ["k"]}),
        [],
        "1 forms for 2 rows",
    ),
    "no kv_proj": (without_kv_proj, [], f"1 missing: {KV_PROJ}"),
    "kv_proj": (with_narrow_kv_proj, [], r"kv_proj.weight is \[48, 47\], not \[48, 48\]"),
}


@pytest.mark.parametrize("spoil, flags, message", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line_and_exit_code_2(spoil, flags, message, slim, tmp_path, capsys):
    folder = slim
    if spoil is not None:
        folder = shutil.copytree(slim, tmp_path / "spoilt")
        spoil(folder)
    assert main(["--model", str(folder), *FLAGS, *flags, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert re.search(message, err) and err.startswith("error: ") and err.count("\n") == 1 and not out
