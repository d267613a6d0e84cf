"""The command that makes an adapter without training: bad input is one line and exit code 2."""

import dataclasses
import json
import shutil

import pytest
from tiny_models import PLAIN, tiny
from tokenizers_made import make_tokenizer

from swiftkv_jax.checkpoint.hf import save_pretrained
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.distill.pair import main


def saved(folder, bos: bool = True, **sizes):
    config = dataclasses.replace(PLAIN, **({"vocab_size": 400, "max_position_embeddings": 64} | sizes))
    save_pretrained(make_tokenizer(folder, bos=bos), *tiny(config, KVPlan.standard(config.num_layers)))
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A base, auxiliaries that do not fit it, what looks like an adapter, and texts."""
    folder = tmp_path_factory.mktemp("pair")
    saved(folder / "base")
    two = {"num_layers": 2, "windows": ()}
    saved(folder / "stranger", bos=False, **two)
    saved(folder / "wide", num_kv_heads=4, **two)
    saved(folder / "short", max_position_embeddings=32, **two)
    shutil.copytree(folder / "base", folder / "adapter" / "auxiliary")
    (folder / "adapter" / "kv_prediction.json").write_text("{}")
    texts = {"text": [f"What follows {i} is {i + 1}. " * 9 for i in range(200)], "few": ["hello there " * 30]}
    for name, each in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in each))
    return folder


HALF = ["--keep", "0,2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep", ""], "--keep takes layers as 0,2,4, not ''"),
        (["--keep", "2,0"], "keep must list some of 0 to 3 in ascending order, not [2, 0]"),
        (["--keep", "0,4"], "keep[1] must be in [0, 3], not 4"),
        ([*HALF, "--tail", "0"], "tail must be at least 1, not 0"),
        ([*HALF, "--tail", "64"], "tail must be below the base's context of 64 tokens, not 64"),
        ([*HALF, "--tokens", "-5000"], "--tokens must be at least 1, not -5000"),
        ([*HALF, "--length", "65"], "--length must be in [2, 64], not 65"),
        (["--auxiliary", "{home}/short", "--length", "33"], "--length must be in [2, 32], not 33"),
        (["--auxiliary", "{home}/stranger"], "have different tokenizers"),
        (["--auxiliary", "{home}/wide", "--start", "identity"], "use least_squares"),
        (["--auxiliary", "{home}/nowhere"], "no such folder: "),
        (["--auxiliary", "{home}/adapter"], "adapter and holds no model of its own: give"),
        ([*HALF, "--base", "{home}/adapter"], "adapter and holds no model of its own: give"),
        ([*HALF, "--text", "{home}/few.jsonl"], 'split "held_out" of'),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(home, tmp_path, capsys, words, said):
    given = {"--base": "{home}/base", "--text": "{home}/text.jsonl", "--length": "16", "--out": str(tmp_path)}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    asked = [word.format(home=home) for pair in given.items() for word in pair]
    assert main(asked) == 2
    found = capsys.readouterr()
    assert found.err.startswith("error: ") and found.err.count("\n") == 1 and said in found.err, found.err
    assert all(line.endswith(" ...") for line in found.out.splitlines()) and not list(tmp_path.iterdir())
