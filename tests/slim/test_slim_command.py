"""`swiftkv slim`: planted conditions are found, what is written is what was measured."""

import json
import math
import re

import hf_models
import jax
import numpy as np
import pytest
import torch
from tokenizers_made import make_words

import swiftkv_jax as skv
from swiftkv_jax.cli.slim import main
from swiftkv_jax.slim import texts
from swiftkv_jax.slim.calibrate import RIDGES, solve

LAYERS, WIDTH = 4, 48
CONDITIONS = (1e3, 1e9, math.inf, 1e3)  # of the layers' W_K
FAR, SINGULAR = 1, 2


def planted(conditions=CONDITIONS):
    """A random model whose W_K have these condition numbers. Its logits are small, so that rows cost about
    what the default bound allows."""
    theirs = hf_models.build("llama", seed=3, num_key_value_heads=4, num_hidden_layers=LAYERS)
    with torch.no_grad():
        theirs.lm_head.weight.mul_(0.05)
        for condition, layer in zip(conditions, theirs.model.layers, strict=True):
            weight = layer.self_attn.k_proj.weight
            u, _, v = torch.linalg.svd(weight.double())
            s = torch.logspace(0, -math.log10(min(condition, 1e9)), WIDTH, dtype=torch.float64)
            weight.copy_(3 * u @ torch.diag(s) @ v)
            if condition == math.inf:
                weight[7] = 0.0
    return theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_words(hf_models.save(planted(), tmp_path_factory.mktemp("planted")))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """60 documents of 40 words."""
    path, random = tmp_path_factory.mktemp("text") / "words.jsonl", np.random.default_rng(0)
    rows = [{"text": " ".join(f"w{i}" for i in random.integers(0, 101, 40))} for _ in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def converted(folder, text, tmp_path_factory):
    """(slim.json, folder) of bfloat16 rows under the default --max-kl."""
    out = tmp_path_factory.mktemp("out") / "slim"
    flags = ["--text", str(text), "--cache-dtype", "bfloat16"]
    assert main(["--model", str(folder), "--out", str(out), *flags]) == 0
    return json.loads((out / "slim.json").read_text()), out


@pytest.mark.slow
def test_rows_with_badly_conditioned_keys_stay_keys_and_values(converted):
    found, out = converted
    assert [row["form"] for row in found["rows"]] == ["k", "kv", "kv", "k"]
    assert found["whole"]["kl"] <= 1e-3 == found["max_kl"]
    assert 0.9e9 < found["rows"][FAR]["condition"] < 1.1e11, "float32 holds no smaller singular value"
    assert "over its share" in found["rows"][FAR]["why"]
    assert f"layer {SINGULAR}: W_K is singular" in found["rows"][SINGULAR]["why"]
    assert found["rows"][SINGULAR]["candidates"] == []
    assert all(0.9e3 < found["rows"][row]["condition"] < 1.1e3 for row in (0, 3))
    assert found["bytes_per_token"] == {"kv": 8 * WIDTH * 2, "now": 6 * WIDTH * 2}
    assert (out / "slim.png").read_bytes().startswith(b"\x89PNG")


def test_the_fit_to_rounded_keys_gives_better_values_where_they_are_rounded(converted):
    """The worse the condition, the more of the model's error that is."""
    for row in (0, FAR, 3):
        exact, fitted = converted[0]["rows"][row]["candidates"]
        assert (exact["matrix"], fitted["matrix"]) == ("exact", "calibrated")
        assert fitted["error"] < exact["error"]
    exact, fitted = converted[0]["rows"][FAR]["candidates"]
    assert fitted["output_error"] < exact["output_error"] / 2 and fitted["kl"] < exact["kl"] / 2


@pytest.mark.slow
def test_the_folder_is_served_as_measured(converted, folder):
    """The checkpoint's plan, its tokenizer, and the plain model behind it."""
    _, out = converted
    llm = skv.LLM(out, max_model_len=32, cache_dtype="bfloat16")
    assert [row.form for row in llm.model.plan.rows] == ["k", "kv", "kv", "k"]
    assert llm.cache_bytes_per_token == 6 * WIDTH * 2
    greedy = skv.SamplingParams(temperature=0.0, max_tokens=3)
    assert llm.generate(["w3 w5"], greedy, False)[0].outputs[0].text
    plain = skv.from_pretrained(folder)[1]
    again = skv.from_pretrained(out, slim=False)[1]
    jax.tree.map(np.testing.assert_array_equal, plain, again)


@pytest.mark.slow
def test_float32_rows_take_the_exact_inverse(folder, text, tmp_path):
    """Without rounding the fit is worse than the inverse; a condition of 1e3 costs next to nothing."""
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


def test_a_text_is_split_in_halves_by_document():
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
        (("--forms", "kv"), "--forms: invalid choice: 'kv' .*auto"),
        (("--cache-dtype", "int4"), "--cache-dtype: invalid choice: 'int4' .*float32"),
        (("--forms", "x"), "as 'x': rotary embedding .*; use --forms auto"),
        (("--forms", "v"), "as 'v': rotary embedding .*; use --forms auto"),
        (("--forms", "k", "--text", text), r"^error: layer 2: W_K is singular .* as 'k'; use --forms auto$"),
        (("--text", tmp_path / "none.jsonl"), "none.jsonl"),
    ):
        said = refused(folder, tmp_path, capsys, *flags)
        assert re.search(message, said), said


def test_grouped_heads_are_refused_or_kept(text, tmp_path, capsys):
    theirs = hf_models.build("llama", seed=3, num_hidden_layers=2)
    folder = make_words(hf_models.save(theirs, tmp_path / "grouped"))
    assert "2 kv heads of 12" in refused(folder, tmp_path, capsys, "--forms", "k")
    assert main(["--model", str(folder), "--out", str(tmp_path / "out"), "--text", str(text)]) == 0
    found = json.loads((tmp_path / "out" / "slim.json").read_text())
    assert all(row["form"] == "kv" and "2 kv heads of 12" in row["why"] for row in found["rows"])
    assert skv.from_pretrained(tmp_path / "out")[0].plan == skv.KVPlan.standard(2)


def of_family(family: str, text, tmp_path, *flags: str, **fields) -> tuple[dict, skv.KVPlan]:
    """(slim.json, the written plan) of a random model of one layer."""
    theirs = hf_models.build(family, seed=3, num_hidden_layers=1, **fields)
    folder, out = make_words(hf_models.save(theirs, tmp_path / "plain")), tmp_path / "out"
    assert main(["--model", str(folder), "--out", str(out), "--text", str(text), *flags]) == 0
    return json.loads((out / "slim.json").read_text()), skv.from_pretrained(out)[0].plan


@pytest.mark.slow
def test_auto_takes_inputs_where_nothing_turns_keys(text, tmp_path):
    """GPT-2: keys, values and inputs are of one size, and inputs measure best."""
    found, plan = of_family("gpt2", text, tmp_path, "--cache-dtype", "bfloat16", **hf_models.GPT2)
    (row,), kl = found["rows"], {}
    for each in row["candidates"]:
        kl.setdefault(each["form"], []).append(each["kl"])
    assert list(map(len, kl.values())) == [2, 2, 1] and min(kl["x"]) < min(kl["k"] + kl["v"])
    assert (row["form"], row["matrix"], plan.forms) == ("x", None, ("x",))
    assert found["whole"]["kl"] <= found["max_kl"] and not found["refused"]
    assert found["bytes_per_token"] == {"kv": 2 * WIDTH * 2, "now": WIDTH * 2}


@pytest.mark.slow("x")
@pytest.mark.parametrize("forms", [pytest.param("auto", marks=pytest.mark.slow), "x"])
def test_the_upper_layers_of_a_student_share_their_inputs(forms, text, tmp_path):
    """Two rows below the split, and one for both layers above it: `auto` sees that it saves most."""
    theirs = hf_models.build("gpt2", seed=3, num_hidden_layers=LAYERS, **hf_models.GPT2)
    teacher = skv.from_pretrained(hf_models.save(theirs, tmp_path / "plain"))
    student, out = make_words(tmp_path / "student"), tmp_path / "out"
    with pytest.warns(skv.UsageWarning, match="no PyTorch code"):
        skv.save_pretrained(student, *skv.to_swiftkv(*teacher, skv.KVPlan.swiftkv(LAYERS, 2)))
        flags = ["--forms", forms, "--cache-dtype", "bfloat16", "--text", str(text)]
        assert main(["--model", str(student), "--out", str(out), *flags]) == 0
    found, plan = json.loads((out / "slim.json").read_text()), skv.from_pretrained(out)[0].plan
    assert plan == skv.KVPlan.swiftkv(LAYERS, 2).stored_as("x") and len(plan.rows) == 3
    assert found["bytes_per_token"] == {"kv": LAYERS * 2 * WIDTH * 2, "now": 3 * WIDTH * 2}
    assert found["whole"]["kl"] <= found["max_kl"]


def test_the_model_itself_and_a_converted_one_are_refused(folder, converted, tmp_path, capsys):
    assert main(["--model", str(folder), "--out", str(folder)]) == 2
    assert "is the model itself" in capsys.readouterr().err
    assert "is converted already" in refused(converted[1], tmp_path, capsys)


@pytest.mark.slow
def test_a_student_is_converted_by_the_row(folder, text, tmp_path):
    """SwiftKV with AcrossKV: rows made at the split, one W_KV for all that read a row."""
    model, params = skv.from_pretrained(folder)
    student = skv.to_swiftkv(model, params, skv.KVPlan.swiftkv(LAYERS, 1, 2))
    skv.save_pretrained(tmp_path / "student", *student)
    flags = ["--text", str(text), "--cache-dtype", "float32"]
    assert main(["--model", str(tmp_path / "student"), "--out", str(tmp_path / "slim"), *flags]) == 0
    found = json.loads((tmp_path / "slim" / "slim.json").read_text())
    assert [row["layers"] for row in found["rows"]] == [[0], [1, 2], [3]]
    slim, _ = skv.from_pretrained(tmp_path / "slim")
    assert [row.form for row in slim.plan.rows] == [row["form"] for row in found["rows"]]
    assert "k" in slim.plan.forms
    assert slim.plan.stored_as("kv") == student[0].plan
