"""`swiftkv slim` on T5 and Whisper: rows of tokens and of sources, measured on what the model
itself says."""

import json
import re

import encoder_models
import jax
import numpy as np
import pytest
import tokenizers_made
import torch
import transformers

import swiftkv_jax as skv
from swiftkv_jax.cli.slim import main
from swiftkv_jax.common.progress import Doing
from swiftkv_jax.core.matrices import between
from swiftkv_jax.slim import sources
from swiftkv_jax.slim.calibrate import EXACT, Candidate, candidates, converted
from swiftkv_jax.slim.texts import Pieces

WIDTH, DECODERS = 48, 2
SINGULAR, FAR = 0, 1  # layers of the spoilt model's cross-attention


def theirs(**changes) -> transformers.T5ForConditionalGeneration:
    return encoder_models.make("t5", num_decoder_layers=DECODERS, **changes)


def saved(model, folder):
    """A folder as transformers saves it; word wN is token N."""
    model.save_pretrained(folder)
    return tokenizers_made.make_words(folder)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return saved(theirs(), tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    folder = encoder_models.save("whisper", tmp_path_factory.mktemp("whisper"), decoder_layers=DECODERS)
    transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1).save_pretrained(folder)
    return tokenizers_made.make_tokenizer(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """20 documents of 40 words."""
    path, random = tmp_path_factory.mktemp("text") / "words.jsonl", np.random.default_rng(0)
    rows = [{"text": " ".join(f"w{i}" for i in random.integers(2, 101, 40))} for _ in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """16 files of two windows each."""
    folder = tmp_path_factory.mktemp("sounds")
    for seed in range(16):
        (folder / f"{seed:02}.wav").write_bytes(encoder_models.wav(2.0, seed))
    return folder


def run(folder, out, *flags) -> dict:
    assert main(["--model", str(folder), "--out", str(out), *map(str, flags)]) == 0
    return json.loads((out / "slim.json").read_text())


@pytest.mark.slow
def test_the_decoder_reads_what_the_model_says_of_each_piece(t5, text):
    """Its own greedy answer, as transformers generates it; documents are whole in one of the halves."""
    model, params = skv.from_pretrained(t5)
    fit, kept = sources.read(str(text), (), t5, model, params, Doing())
    rows = map(json.loads, text.read_text().splitlines())
    documents = [[int(word[1:]) for word in row["text"].split()] for row in rows]
    order = [documents[i] for i in range(0, 20, 2)], [documents[i] for i in range(1, 20, 2)]
    for half, found in zip((fit, kept), order, strict=True):
        count = len(half.tokens)
        ids, lengths = np.array(found[:count]), np.full(count, 40)
        answers = {"max_new_tokens": sources.ANSWER, "do_sample": False}
        want = encoder_models.load(t5).generate(**encoder_models.asked("t5", ids, lengths), **answers)
        for row, real, said in zip(half.tokens, half.real, want[:, :-1].tolist(), strict=True):
            assert row[real].tolist() == said[: real.sum()] and 1 not in said[: real.sum()]
        encoded, _ = encoder_models.torch_logits(encoder_models.load(t5), ids, lengths, ids[:, :1])
        np.testing.assert_allclose(half.beside.x, encoded, atol=1e-4)
        assert half.beside.lengths.tolist() == lengths.tolist()


def keys_and_values(folder, half: Pieces) -> list[tuple[np.ndarray, np.ndarray]]:
    """(keys, values) [n, E] that the layers of transformers make of tokens, then of sources."""
    model, kept = encoder_models.load(folder), {}
    layers = [block.layer[0].SelfAttention for block in model.decoder.block]
    layers += [block.layer[1].EncDecAttention for block in model.decoder.block]
    made = [made for layer in layers for made in (layer.k, layer.v)]
    for projection in made:
        projection.register_forward_hook(lambda module, _, out: kept.update({module: out.double().numpy()}))
    encoded = transformers.modeling_outputs.BaseModelOutput(torch.tensor(half.beside.x))
    seen = torch.tensor(np.arange(half.beside.x.shape[1]) < half.beside.lengths[:, None])
    with torch.no_grad():
        model(
            encoder_outputs=encoded, attention_mask=seen, decoder_input_ids=torch.tensor(half.tokens).long()
        )
    where = [half.real] * len(layers) + [half.beside.some] * len(layers)
    rows = [kept[projection][some] for projection, some in zip(made, where, strict=True)]
    return list(zip(rows[::2], rows[1::2], strict=True))


@pytest.mark.slow
def test_errors_are_those_of_transformers_keys_and_values(text, tmp_path):
    """Both candidates of every row, exact inverse and fit, are recomputed on keys in bfloat16."""
    folder = saved(encoder_models.make("t5"), tmp_path / "three layers")
    model, params = skv.from_pretrained(folder)
    halves = sources.read(str(text), (), folder, model, params, Doing())
    fit, kept = (keys_and_values(folder, half) for half in halves)
    found = sorted(candidates(model, params, *halves, ["k"], "bfloat16"), key=lambda found: found.row)
    assert len(found) == len(kept) == 6
    for row, (keys, values), (other, wanted) in zip(found, kept, fit, strict=True):
        exact, fitted = row.candidates
        for one in (exact, fitted):
            back = torch.tensor(keys).bfloat16().double().numpy() @ one.matrix
            error = np.linalg.norm(back - values) / np.linalg.norm(values)
            assert one.error == pytest.approx(error, rel=0.02), row.row
        on_fit = torch.tensor(other).bfloat16().double().numpy()
        best = np.linalg.lstsq(on_fit, wanted, rcond=None)[0]
        least, got = (np.linalg.norm(on_fit @ matrix - wanted) for matrix in (best, fitted.matrix))
        assert got < 1.2 * least + 1e-3 * np.linalg.norm(wanted), row.row


@pytest.mark.slow
def test_inputs_are_one_row_for_all_layers(whisper, sounds, tmp_path):
    found = run(whisper, tmp_path / "out", "--audio", sounds, "--forms", "x", "--cache-dtype", "bfloat16")
    assert [row["space"] for row in found["rows"]] == ["self"] * DECODERS + ["encoder"] * DECODERS
    assert [row["layers"] for row in found["rows"]] == [[0], [1]] * 2
    assert all(row["form"] == "x" and row["candidates"][0]["error"] == 0 for row in found["rows"])
    assert found["bytes_per_token"] == {"kv": 2 * DECODERS * WIDTH * 2, "now": DECODERS * WIDTH * 2}
    assert found["bytes_per_position"] == {"kv": 2 * DECODERS * WIDTH * 2, "now": WIDTH * 2}
    assert 0 < found["whole"]["kl"] < 1e-4 and set(found["every_row"]) == {
        "x exact",
        "own x exact",
        "cross x exact",
    }
    plan = skv.from_pretrained(tmp_path / "out")[0].plan
    assert plan == skv.KVPlan.standard(DECODERS).stored_as("x").with_cross("x")
    plain, slim = (skv.LLM(folder, max_num_seqs=2) for folder in (whisper, tmp_path / "out"))
    assert slim.transcribe(sounds / "00.wav", "de").text == plain.transcribe(sounds / "00.wav", "de").text


@pytest.mark.slow
def test_float32_keys_of_any_layer_and_the_hybrid_are_the_model(t5, text, tmp_path):
    """In exact arithmetic they are equal: what is measured is rounding in float32 behind inverses."""
    found = run(t5, tmp_path / "out", "--text", text, "--forms", "k")
    assert all(0 < row["candidates"][0]["error"] < 1e-4 for row in found["rows"])
    assert all(0 < row["candidates"][0]["output_error"] < 1e-4 for row in found["rows"])
    ways = found["every_row"]
    assert all(0 <= ways[way]["kl"] < 1e-8 for way in ("k exact", "own k exact", "cross k exact"))
    assert 0 < ways["cross hybrid exact"]["kl"] < 1e-8
    assert found["bytes_per_position"] == {"kv": 2 * DECODERS * WIDTH * 4, "now": DECODERS * WIDTH * 4}
    assert skv.from_pretrained(tmp_path / "out")[0].plan.cross_forms == ("k",) * DECODERS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_auto_chooses_inputs_and_prints_the_cost_of_other_forms(
    name, t5, whisper, text, sounds, tmp_path, capsys
):
    folder, data = (t5, ("--text", text)) if name == "t5" else (whisper, ("--audio", sounds))
    found = run(folder, tmp_path / "out", *data, "--cache-dtype", "bfloat16")
    assert {row["form"] for row in found["rows"][DECODERS:]} == {"x"}
    for row in found["rows"]:
        ways = [(each["form"], each["matrix"]) for each in row["candidates"]]
        assert ways == [*((form, how) for form in "kv" for how in ("exact", "calibrated")), ("x", None)]
    assert found["whole"]["kl"] <= found["max_kl"] and (tmp_path / "out" / "slim.png").exists()
    kl = {way: each["kl"] for way, each in found["every_row"].items()}
    plain = found["keys_and_values"]["kl"]
    assert kl["cross x exact"] < 2 * plain and kl["x exact"] < 2 * plain
    assert min(kl["cross hybrid exact"], kl["cross hybrid calibrated"]) > kl["cross x exact"]
    said = capsys.readouterr().out
    assert "every cross row k calibrated: KL" in said and "every cross row hybrid exact: KL" in said
    assert re.search(r"\n +3  cross 1 .* x .*<- taken", said)
    assert "96 bytes a position of a source instead of 384" in said


def test_least_squares_solutions_reach_their_own_rows_for_any_sharing(t5):
    """Rows of inputs are one: those behind it move up."""
    model, params = skv.from_pretrained(saved(encoder_models.make("t5"), t5.parent / "three"))
    plan, row = model.plan, 5  # the third layer's row of its source
    assert plan.name(row) == "layer 2's cross-attention" and plan.readers(row) == (2,)
    kernels = [np.asarray(params["rows"][1][f"{name}_proj"]["kernel"][2], np.float64) for name in "kv"]
    picks = [Candidate(3, "x", EXACT), Candidate(4, "x", EXACT)]
    own = Candidate(row, "k", EXACT, between(*kernels, "row"))
    slim, exact = converted(model, params, [*picks, own])
    assert slim.plan.cross_forms == ("x", "x", "k") and len(slim.plan.rows) == 5
    _, other = converted(model, params, [*picks, Candidate(row, "k", EXACT, np.zeros((WIDTH, WIDTH)))])
    want = skv.to_slim(model, params, "kv", cross_forms=["x", "x", "k"])[1]
    jax.tree.map(np.testing.assert_array_equal, exact, want)
    assert np.abs(want["rows"][-1]["kv_proj"]["kernel"]).max() > 0
    assert not np.any(other["rows"][-1]["kv_proj"]["kernel"])
