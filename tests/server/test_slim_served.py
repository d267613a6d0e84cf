"""serve.py and a converted folder: as its rows say, as the plain model, both at once; and what is refused."""

from pathlib import Path

import hf_models
import pytest
import transformers
from http_server import Running

import swiftkv_jax as skv
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.server.main import build_parser, main, make_api, server_settings

FLAGS = "--max-num-seqs 2 --max-num-batched-tokens 32 --max-model-len 64".split()


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


def test_bad_input_is_one_line_and_exit_code_2(slim, capsys):
    for words in (["--kernels", "fill=xla"], ["--kernels", "chunk=cudnn"], ["--slim", "no"]):
        assert main(["--model", str(slim), *FLAGS, *words, "--quiet"]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: ") and err.count("\n") == 1 and not out
