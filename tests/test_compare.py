"""The comparison at equal FLOPs: its prompts, its counts, its averages, and what it writes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import PLAIN, tiny

import swiftkv_jax as skv
from swiftkv_jax import compare
from swiftkv_jax.analysis.prediction_flops import Sizes
from swiftkv_jax.baselines import RandomPruning
from swiftkv_jax.compare import Answers, Point, Prompts
from swiftkv_jax.distill.sources import open_documents, split_of
from swiftkv_jax.folder import DEMO
from swiftkv_jax.model import forward, logits
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.text.tokenizer import load_tokenizer

ROWS = np.random.default_rng(0).integers(0, PLAIN.vocab_size, (5, 12)).astype(np.int32)
PROMPTS = Prompts(ROWS, np.array([[2, 11, 7], [3, 4, 5], [6, 8, 10], [9, 2, 2], [11, 6, 3]], np.int32))
POINTS = [
    Point("SwiftKV", "split 2", 0.5, 0.02, 0.001, 0.9, 0.01),
    Point("KV prediction", "layers 0 2", 0.6, 0.01, 0.001, 0.95, 0.01),
    Point("KV prediction", "layers 0", 0.2, 0.05, 0.001, 0.8, 0.01),
    Point("random pruning", "keep 0.5", 0.5, 0.4, 0.01, 0.6, 0.02),
    Point("random pruning", "keep 0.75", 0.75, 0.2, 0.01, 0.7, 0.02),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """400 documents, some of them held out."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = (
        json.dumps({"text": f"What follows {i} is {i + 1}, not {i - 1}. " * 12}) + "\n" for i in range(400)
    )
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def test_prompts_are_the_beginnings_of_held_out_documents_of_every_length(text):
    folder = DEMO / "teacher"
    found = compare.prompts_of(text, folder, 300, 64)
    assert found.lengths.size >= 300 and found.tokens.shape[1] == 64
    assert found.lengths.min() == 2 and found.lengths.max() == 63
    counts = np.histogram(found.lengths, bins=4, range=(2, 64))[0]
    assert counts.min() > 0.9 * counts.mean()
    row, each = 3, found.lengths[3, 0]
    assert found.targets[row, 0] == found.tokens[row, each]
    documents, tokenizer = open_documents((text,)), load_tokenizer(folder)
    held_out = next(d for i in range(len(documents)) if split_of((d := documents[i]).id) == "held_out")
    assert found.tokens[0].tolist() == tokenizer.encode(held_out.text)[:64]


def test_both_ways_to_answer_are_the_models_own_where_nothing_is_left_out():
    model, params = tiny(PLAIN, KVPlan.standard(4))
    scores = np.asarray(logits(model, params, forward(model, params, jnp.asarray(ROWS))), np.float64)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    at = np.take_along_axis(scores, PROMPTS.lengths[..., None] - 1, axis=1)
    want = -np.take_along_axis(at, PROMPTS.targets[..., None], axis=2)[..., 0]
    by_rows = compare._by_rows(model, params, PROMPTS)
    by_prompts, flops = compare.answers_by_prompts(model, params, RandomPruning(keep=1.0), PROMPTS)
    for found in (by_rows, by_prompts):
        np.testing.assert_allclose(found.nats, want, atol=2e-5)
        np.testing.assert_array_equal(found.likeliest, at.argmax(-1))
    assert flops == sum(compare.full_depth(Sizes.of(PLAIN), int(n)) for n in PROMPTS.lengths.ravel())


def test_flops_of_swiftkv_are_those_counted_by_hand():
    """A prompt of 10 tokens; 4 layers of width 48, FFN 40, 4 query heads and 2 kv heads of 12, split 1."""
    rows, rest, key = 2 * 48 * 2 * 24, 2 * 48 * (2 * 48 + 3 * 40), 4 * 48
    all_tokens = 10 * (4 * rows + rest) + key * 55
    assert compare.swiftkv_flops(Sizes.of(PLAIN), 1, 10) == all_tokens + 3 * (rest + key * 10)
    assert compare.full_depth(Sizes.of(PLAIN), 10) == 4 * (10 * (rows + rest) + key * 55)


def test_errors_are_over_rows_in_which_prompts_are_alike():
    own = Answers(np.zeros((3, 2)), np.zeros((3, 2), int))
    found = Answers(np.array([[1.0, 1.0], [2.0, 4.0], [2.0, 0.0]]), np.array([[0, 1], [0, 0], [1, 1]]))
    got = compare.point("a", "b", 0.5, found, own)
    assert (got.gap, got.agreement) == (pytest.approx(5 / 3), pytest.approx(0.5))
    assert got.gap_error == pytest.approx(np.std([1, 3, 1], ddof=1) / 3**0.5)
    assert got.agreement_error == pytest.approx(np.std([0.5, 1, 0], ddof=1) / 3**0.5)


def test_a_curve_is_straight_between_its_points_and_ends_with_them():
    assert compare.at_equal_flops(POINTS, "KV prediction", 0.5) == pytest.approx(0.02)
    assert np.isnan(compare.at_equal_flops(POINTS, "KV prediction", 0.75))
    lines = compare.table(POINTS).splitlines()
    assert lines[5] == "| random pruning | keep 0.5 | 0.500 | 0.4000 ± 0.0100 | 0.0200 | 0.600 ± 0.020 |"
    assert lines[6].split("|")[5].strip() == "" and lines[3].split("|")[5].strip() == ""


def test_the_command_writes_a_table_numbers_and_a_plot(text, tmp_path, monkeypatch, capsys):
    for name, points in (("students", POINTS[:1]), ("predicted", POINTS[1:3]), ("others", POINTS[3:])):
        monkeypatch.setattr(compare, name, lambda *args, points=points: points)
    asked = ["--model", str(DEMO / "teacher"), "--text", text, "--length", "32", "--prompts", "40"]
    assert compare.main([*asked, "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    saved = json.loads((tmp_path / "compare.json").read_text())
    assert [Point(**each) for each in saved["points"]] == POINTS
    assert saved["prompts"] >= 40 and saved["length"] == 32 and 2 < saved["teacher_nats"] < 6
    assert (tmp_path / "compare.md").read_text() == compare.table(POINTS) + "\n"
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys):
    student, shallow = tmp_path / "student", tmp_path / "shallow"
    teacher = skv.from_pretrained(DEMO / "teacher")
    skv.save_pretrained(student, *skv.to_swiftkv(*teacher, KVPlan.swiftkv(8, 4)))
    skv.save_pretrained(shallow, *skv.layer_pruned(*teacher, (0, 1)))
    text = tmp_path / "short.txt"
    text.write_text("short")
    model = ["--model", str(DEMO / "teacher")]
    for words, said in (
        ([*model, "--prompts", "0"], "--prompts must be at least 1, not 0"),
        ([*model, "--length", "3"], "--length must be in [4, 2048], not 3"),
        (["--model", str(student)], "compare takes a standard model of 4 layers or more"),
        (["--model", str(shallow)], "compare takes a standard model of 4 layers or more"),
        ([*model, "--text", str(text)], "held_out"),
    ):
        assert compare.main([*words, "--out", str(tmp_path / "out")]) == 2
        said_all = capsys.readouterr().err
        assert said_all.startswith("error: ") and said_all.count("\n") == 1 and said in said_all
    assert not (tmp_path / "out").exists()
