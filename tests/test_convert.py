"""Students made without training: they are what distillation would begin with, and cost what is said."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import PLAIN, tiny
from tokenizers_made import make_tokenizer

import swiftkv_jax as skv
from swiftkv_jax.checkpoint.hf import save_pretrained
from swiftkv_jax.cli import convert as command
from swiftkv_jax.cli.convert import convert, main
from swiftkv_jax.cli.untrained import apart
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import predict
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.scan import forward
from swiftkv_jax.distill.config import PlanConfig, PredictConfig
from swiftkv_jax.distill.data.loader import DataConfig, evaluation_batches
from swiftkv_jax.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TEACHER = ROOT / "demo" / "teacher"
LENGTH = 128


@pytest.fixture(autouse=True)
def fewer_tokens(monkeypatch):
    monkeypatch.setattr(command, "HELD_OUT_TOKENS", 4096)


def made(out: Path, split: int, init: str = "least_squares", share: int = 1, **options) -> dict[str, float]:
    plan = PlanConfig(split=split, share=share, init=init, init_tokens=8192)
    return convert(str(TEACHER), plan, out, length=LENGTH, **options)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("fitted") / "student"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "HELD_OUT_TOKENS", 4096)
        return out, made(out, 3)


def test_an_untrained_student_at_the_last_split_equals_its_teacher_in_convert(tmp_path, capsys):
    """At split L-1 an untrained student is its teacher. A custom `say` gets every line; none is printed."""
    said: list[str] = []
    found = made(tmp_path / "out", 7, "fold", say=said.append)
    assert capsys.readouterr() == ("", "") and said[0].startswith("reading ") and "saved in" in said[-1]
    assert abs(found["gap"]) < 1e-5 and found["kl"] < 1e-5 and found["agreement"] == 1.0
    assert found["cache_bytes"] == 1.0 and found["prompt_flops"] < 1.0


def held_out_pieces(tokenizer, text, length: int, scratch: Path) -> tuple[np.ndarray, ...]:
    """(tokens, targets, mask) of the rows that `convert` evaluates on, each segment in a row of its own."""
    data = DataConfig(sources=(str(text),), seq_len=length, batch_size=4, long_documents="fill")
    _, data = apart(data, scratch)
    rows = []
    for batch in evaluation_batches(data, tokenizer, 4096 // length // 4):
        for row, segments in enumerate(batch.segments):
            for number in range(1, segments.max() + 1):
                chosen = [x[row][segments == number] for x in (batch.tokens, batch.targets, batch.mask)]
                rows.append([np.pad(x, (0, length - len(x))) for x in chosen])
    return tuple(np.stack(each) for each in zip(*rows, strict=True))


@pytest.mark.slow
def test_the_saved_student_has_the_printed_quality(fitted, tmp_path):
    """The cost is recomputed from the logits of the two folders, in float64."""
    out, found = fitted
    tokens, targets, mask = held_out_pieces(load_tokenizer(out), command.CORPUS, LENGTH, tmp_path)
    sure = []
    for path in (TEACHER, out):
        model, params = skv.from_pretrained(path, dtype="float32")
        x = np.asarray(jax.jit(model.apply)({"params": params}, tokens), np.float64)[mask > 0]
        sure.append(x - np.logaddexp.reduce(x, axis=-1, keepdims=True))
    teacher, student = sure
    nats = [-np.take_along_axis(x, targets[mask > 0][:, None], 1).mean() for x in sure]
    assert found["tokens"] == len(teacher) > 3500
    assert found["teacher_cross_entropy"] == pytest.approx(nats[0], abs=1e-4)
    assert found["gap"] == pytest.approx(nats[1] - nats[0], abs=1e-3), "it is saved in bfloat16"
    assert found["kl"] == pytest.approx((np.exp(teacher) * (teacher - student)).sum(-1).mean(), rel=0.01)
    assert found["agreement"] == pytest.approx((teacher.argmax(-1) == student.argmax(-1)).mean(), abs=5e-3)


def test_a_conversion_with_shared_rows_is_measured_on_a_given_text(tmp_path, capsys):
    """A single text is held out by its pieces."""
    text = tmp_path / "mine.txt"
    text.write_text(
        "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("results", "architecture"))
    )
    found = made(tmp_path / "out", 4, "fold", share=2, text=str(text))
    assert found["cache_bytes"] == 6 / 8 and 1000 < found["tokens"] < 4096
    said = capsys.readouterr().out
    assert "split 4 of 8 layers, share 2, fold, on" in said and "cache          25% saved" in said
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["num_key_value_layers"], raw["key_value_group_size"]) == (4, 2)
    assert raw["torch_dtype"] == "bfloat16", "as the teacher's"


def test_a_conversion_with_a_tail_generates_as_its_model_does(tmp_path, capsys):
    words = ["--split", "3", "--init", "fold", "--length", "64", "--tail", "40", "--out"]
    assert main([str(TEACHER), *words, str(tmp_path / "out")]) == 0
    assert "split 3 of 8 layers, tail 40, fold, on" in capsys.readouterr().out
    params = skv.SamplingParams(temperature=0.0, max_tokens=20)
    texts = ["The cache", "def read(self, n):"]
    ours, theirs = (skv.LLM(path).generate(texts, params, False) for path in (tmp_path / "out", TEACHER))
    assert [x.outputs[0].text for x in ours] == [x.outputs[0].text for x in theirs]


def test_a_model_is_not_written_over(tmp_path, capsys):
    """Neither the one that is converted nor another."""
    for name in ("mine", "other"):
        shutil.copytree(TEACHER, tmp_path / name)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = ["--split", "4", "--init", "fold", "--length", "16"]
    for out in ("mine", "other", "other/../mine"):
        assert main([str(tmp_path / "mine"), *words, "--out", str(tmp_path / out)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"{out} holds a run, or a model that is not a student" in error
    assert kept == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_student_is_replaced_and_is_no_model_to_convert(fitted, tmp_path, capsys):
    words = ["--split", "4", "--init", "fold", "--length", "16"]
    student = tmp_path / "a student"
    shutil.copytree(fitted[0], student)
    assert main([str(TEACHER), *words, "--out", str(student)]) == 0
    assert f"serve it: swiftkv serve '{student}' --http" in capsys.readouterr().out
    assert main([str(student), *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error == f"error: {student} is already a student; give the model it was made from\n"


@pytest.mark.parametrize(
    "words, said",
    [
        (["--split", "8"], "--split must be in [1, 7], not 8"),
        (["--split", "4", "--length", "4096"], "--length must be in [2, 2048], not 4096"),
        (["--split", "4", "--text", "nowhere.txt"], "source nowhere.txt does not exist"),
        (["--split", "4", "--tokens", "64", "--length", "16"], "--tokens must be at least 193, not 64"),
        ([], "one of the arguments --split --keep --auxiliary is required"),
    ],
)
def test_invalid_arguments_are_refused_in_a_line(words, said, tmp_path, capsys):
    assert main([str(TEACHER), *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error
    assert not (tmp_path / "out").exists()


def saved(folder, bos: bool = True, **sizes):
    config = dataclasses.replace(PLAIN, **({"vocab_size": 400, "max_position_embeddings": 64} | sizes))
    save_pretrained(make_tokenizer(folder, bos=bos), *tiny(config, KVPlan.standard(config.num_layers)))
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
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
        (["--keep", "2,"], "--keep takes layers as 0,2,4, not '2,'"),
        (["--keep", "0,4"], "keep[1] must be in [0, 3], not 4"),
        ([*HALF, "--tail", "64"], "tail must be below the base's context of 64 tokens, not 64"),
        (["--auxiliary", "{home}/short", "--length", "33"], "--length must be in [2, 32], not 33"),
        (["--auxiliary", "{home}/stranger"], "have different tokenizers"),
        (["--auxiliary", "{home}/wide", "--init", "identity"], "use least_squares"),
        (["--auxiliary", "{home}/adapter"], "adapter is an adapter: give"),
        ([*HALF, "--text", "{home}/few.jsonl"], "few.jsonl is too short: give a text"),
    ],
)
def test_a_pair_that_cannot_be_made_is_one_line(pairs, tmp_path, capsys, words, said):
    given = {
        "": "{home}/base",
        "--text": "{home}/text.jsonl",
        "--length": "16",
        "--out": str(tmp_path / "out"),
    }
    given |= dict(zip(words[::2], words[1::2], strict=True))
    asked = [word.format(home=pairs) for pair in given.items() for word in pair if word]
    assert main(asked) == 2
    found = capsys.readouterr()
    assert found.err.startswith("error: ") and found.err.count("\n") == 1 and said in found.err, found.err
    assert all(line.endswith(" ...") for line in found.out.splitlines()) and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_adapter_is_measured_as_it_is_served(pairs, tmp_path):
    """Each position reads predicted rows of earlier tokens and its own row; recomputed from the folder."""
    text, part = pairs / "text.jsonl", PredictConfig(keep=(0, 2), init_tokens=2000)
    figures = convert(str(pairs / "base"), part, tmp_path / "out", str(text), length=16)
    tokens, targets, mask = held_out_pieces(load_tokenizer(tmp_path / "out"), text, 16, tmp_path)
    tokens = jnp.asarray(tokens)
    model, params = skv.from_pretrained(tmp_path / "out", dtype="float32")
    base = model.base, params["base"]
    sure = []
    for stream in (forward(*base, tokens), predict.forward(model, params, tokens)):
        x = np.asarray(logits(*base, stream), np.float64)[mask > 0]
        sure.append(x - np.logaddexp.reduce(x, axis=-1, keepdims=True))
    nats = [-np.take_along_axis(x, targets[mask > 0][:, None], 1).mean() for x in sure]
    teacher, student = sure
    assert figures["tokens"] == len(teacher) > 100
    assert figures["gap"] == pytest.approx(nats[1] - nats[0], abs=1e-5) and abs(figures["gap"]) > 1e-3
    assert figures["kl"] == pytest.approx((np.exp(teacher) * (teacher - student)).sum(-1).mean(), rel=1e-3)
