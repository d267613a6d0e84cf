"""`python -m swiftkv_jax.slim`: planted conditions are found, what is written is what was measured."""

import json
import re

import hf_models
import jax
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import swiftkv_jax as skv
from swiftkv_jax.slim import texts
from swiftkv_jax.slim.__main__ import main
from swiftkv_jax.slim.calibrate import RIDGES, solve

LAYERS, WIDTH = 3, 48
FAR, SINGULAR = 1, 2  # the layers whose W_K has condition 1e9, and none


def with_tokenizer(folder):
    """Word wN is token N."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def planted(family: str = "llama"):
    """A random model whose W_K have condition 1e3; one has 1e9, and one is singular."""
    theirs = hf_models.build(family, seed=3, num_key_value_heads=4, num_hidden_layers=LAYERS)
    with torch.no_grad():
        for i, layer in enumerate(theirs.model.layers):
            weight = layer.self_attn.k_proj.weight
            u, _, v = torch.linalg.svd(weight.double())
            s = torch.logspace(0, -9 if i == FAR else -3, WIDTH, dtype=torch.float64)
            s[-1] = 0.0 if i == SINGULAR else s[-1]
            weight.copy_(3 * u @ torch.diag(s) @ v)
            if i == SINGULAR:
                weight[7] = 0.0
    return theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer(hf_models.save(planted(), tmp_path_factory.mktemp("planted")))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """60 documents of 40 words."""
    path, random = tmp_path_factory.mktemp("text") / "words.jsonl", np.random.default_rng(0)
    rows = [{"text": " ".join(f"w{i}" for i in random.integers(0, 101, 40))} for _ in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def converted(folder, text, tmp_path_factory):
    """(slim.json, folder) of bfloat16 rows under --max-kl 0.4."""
    out = tmp_path_factory.mktemp("out") / "slim"
    flags = ["--text", str(text), "--cache-dtype", "bfloat16", "--max-kl", "0.4"]
    assert main(["--model", str(folder), "--out", str(out), *flags]) == 0
    return json.loads((out / "slim.json").read_text()), out


def test_planted_conditions_decide(converted):
    found, out = converted
    assert [row["form"] for row in found["rows"]] == ["k", "kv", "kv"]
    assert found["whole"]["kl"] <= 0.4 == found["max_kl"]
    assert 0.9e9 < found["rows"][FAR]["condition"] < 1.1e11, "float32 holds no smaller singular value"
    assert "over its share" in found["rows"][FAR]["why"]
    assert f"layer {SINGULAR}: W_K is singular" in found["rows"][SINGULAR]["why"]
    assert found["rows"][SINGULAR]["candidates"] == []
    assert 0.9e3 < found["rows"][0]["condition"] < 1.1e3
    assert found["bytes_per_token"] == {"kv": 6 * WIDTH * 2, "now": 5 * WIDTH * 2}
    assert (out / "slim.png").read_bytes().startswith(b"\x89PNG")


def test_the_fit_to_rounded_keys_is_better_where_they_are_rounded(converted):
    for row in (0, FAR):
        exact, fitted = converted[0]["rows"][row]["candidates"]
        assert (exact["matrix"], fitted["matrix"]) == ("exact", "calibrated")
        assert fitted["error"] < exact["error"] and fitted["output_error"] < exact["output_error"]
        assert fitted["kl"] < exact["kl"]


def test_the_folder_is_served_as_measured(converted, folder):
    """The checkpoint's plan, its tokenizer, and the plain model behind it."""
    _, out = converted
    llm = skv.LLM(out, max_model_len=32, cache_dtype="bfloat16")
    assert [row.form for row in llm.model.plan.rows] == ["k", "kv", "kv"]
    assert llm.cache_bytes_per_token == 5 * WIDTH * 2
    assert (
        llm.generate(["w3 w5"], skv.SamplingParams(temperature=0.0, max_tokens=3), False)[0].outputs[0].text
    )
    plain = skv.from_pretrained(folder)[1]
    again = skv.from_pretrained(out, slim=False)[1]
    jax.tree.map(np.testing.assert_array_equal, plain, again)


def test_float32_rows_take_the_exact_inverse(folder, text, tmp_path):
    """Where nothing is rounded away the fit is the worse one; condition 1e3 costs next to nothing."""
    assert main(["--model", str(folder), "--out", str(tmp_path / "out"), "--text", str(text)]) == 0
    found = json.loads((tmp_path / "out" / "slim.json").read_text())
    assert (found["rows"][0]["form"], found["rows"][0]["matrix"]) == ("k", "exact")
    assert found["rows"][0]["candidates"][0]["kl"] < 1e-7
    assert found["rows"][SINGULAR]["form"] == "kv" and found["whole"]["kl"] <= 1e-3


def test_the_fit_is_least_squares():
    random = np.random.default_rng(0)
    rows, wanted = random.standard_normal((90, 12)), random.standard_normal((90, 12))
    want = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    for ridge, got in zip(RIDGES, solve(rows, wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=10 * ridge)


def test_a_text_is_halved_by_documents():
    documents = [[i] * length for i, length in enumerate((500, 90, 90, 90, 300, 40))]
    fit, kept = texts.halves(iter(documents), inputs=8, context=64, vocab=9)
    assert fit.tokens.shape[1] == kept.tokens.shape[1] == 64
    halves = [{int(x) for x in half.tokens[half.real]} for half in (fit, kept)]
    assert halves == [{0}, {1, 2, 3, 4}] and fit.count == texts.MOST * 8
    one = texts.halves([[], list(range(300))], inputs=8, context=64, vocab=300)
    assert [half.tokens[half.real].tolist() for half in one] == [list(range(128)), list(range(150, 300))]
    assert [batch.tokens.shape for batch in kept.batches()] == [(4, 64)] * 3


def refused(folder, tmp_path, capsys, *flags) -> str:
    code = main(["--model", str(folder), "--out", str(tmp_path / "out"), *map(str, flags)])
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()
    return said


def test_bad_flags_are_one_line(folder, text, tmp_path, capsys):
    for flags, message in (
        (("--max-kl", 0), "--max-kl must be above 0, not 0.0"),
        (("--max-kl", "nan"), "--max-kl must be a finite number"),
        (("--forms", "kv"), "--forms must be one of auto, k, v, x, not 'kv'"),
        (("--cache-dtype", "int4"), "--cache-dtype must be one of float32, .* not 'int4'"),
        (("--forms", "x"), "as 'x': rotary embedding stands between inputs and keys: .*; use --forms auto"),
        (("--forms", "v"), "as 'v': rotary embedding stands between values and keys: .*; use --forms auto"),
        (
            ("--forms", "k", "--text", text),
            r"^error: layer 2: W_K is singular .* as 'k'; use --forms auto$",
        ),
        (("--text", tmp_path / "none.jsonl"), "none.jsonl"),
    ):
        said = refused(folder, tmp_path, capsys, *flags)
        assert re.search(message, said), said


def test_a_short_text_says_what_is_there_and_what_is_needed(folder, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("w1 w2 w3 " * 100)
    said = refused(folder, tmp_path, capsys, "--text", short)
    assert (
        "150 tokens to fit on and 150 of other documents" in said and "384 (8 for each of 48 inputs)" in said
    )


def test_grouped_heads_are_refused_or_kept(text, tmp_path, capsys):
    theirs = hf_models.build("llama", seed=3, num_hidden_layers=2)
    folder = with_tokenizer(hf_models.save(theirs, tmp_path / "grouped"))
    said = refused(folder, tmp_path, capsys, "--forms", "k")
    assert (
        "2 kv heads of 12 make 24 columns of 48 inputs: keys do not determine values; use --forms auto"
        in said
    )
    assert main(["--model", str(folder), "--out", str(tmp_path / "out"), "--text", str(text)]) == 0
    found = json.loads((tmp_path / "out" / "slim.json").read_text())
    assert all(row["form"] == "kv" and "2 kv heads of 12" in row["why"] for row in found["rows"])
    assert skv.from_pretrained(tmp_path / "out")[0].plan == skv.KVPlan.standard(2)


def test_the_model_itself_and_a_converted_one_are_refused(folder, converted, tmp_path, capsys):
    assert main(["--model", str(folder), "--out", str(folder)]) == 2
    assert "is the model itself" in capsys.readouterr().err
    assert "is converted already" in refused(converted[1], tmp_path, capsys)


def test_a_student_is_converted_by_the_row(folder, text, tmp_path):
    """SwiftKV with AcrossKV: rows made at the split, one W_KV for all that read a row."""
    model, params = skv.from_pretrained(folder)
    student = skv.to_swiftkv(model, params, skv.KVPlan.swiftkv(LAYERS, 1, 2))
    skv.save_pretrained(tmp_path / "student", *student)
    flags = ["--text", str(text), "--cache-dtype", "float32"]
    assert main(["--model", str(tmp_path / "student"), "--out", str(tmp_path / "slim"), *flags]) == 0
    found = json.loads((tmp_path / "slim" / "slim.json").read_text())
    assert [row["layers"] for row in found["rows"]] == [[0], [1, 2]]
    slim, _ = skv.from_pretrained(tmp_path / "slim")
    assert [row.form for row in slim.plan.rows] == [row["form"] for row in found["rows"]]
    assert "k" in slim.plan.forms
    assert slim.plan.stored_as("kv") == student[0].plan
