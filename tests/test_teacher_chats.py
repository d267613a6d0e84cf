"""`self://prompts.jsonl`: chats that a model writes itself are sampled once, kept, and trained on."""

import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest
import transformers
from tiny_models import WORDS, tiny
from tokenizers_made import CHATML, INSTRUCT, PLAIN, make_tokenizer

import swiftkv_jax as skv
from swiftkv_jax.cli import teacher_chats
from swiftkv_jax.cli.teacher_chats import Sampling
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.progress import Doing
from swiftkv_jax.distill.config import Experiment, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig
from swiftkv_jax.distill.data.samples import Samples
from swiftkv_jax.distill.data.sources import open_documents
from swiftkv_jax.text.tokenizer import load_tokenizer

PROMPTS = [
    {"prompt": "the cat"},
    {"messages": [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "old"}]},
    {"question": "the log", "response": "old", "system_prompt": "sit"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    skv.save_pretrained(make_tokenizer(folder, CHATML), *tiny(WORDS, skv.KVPlan.standard(4)))
    return folder


@pytest.fixture
def source(tmp_path, monkeypatch) -> str:
    """A source of three prompts; the cache of `datasets` is empty."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return f"self://{path}?max_tokens=6"


def nothing_is_written(*_args):
    raise AssertionError("the engine is asked again")


@pytest.mark.slow
def test_a_model_writes_its_answers_once_and_a_run_trains_on_them(model, source, monkeypatch, capsys):
    data = DataConfig(sources=(source,), seq_len=64, batch_size=1, mask="assistant")
    e = Experiment(name="x", model=str(model), plan=PlanConfig(split=2), data=data, evaluation=data)
    with monkeypatch.context() as patch:
        ready = teacher_chats.with_chats(e)
        patch.setattr(teacher_chats, "_answers", nothing_is_written)
        assert teacher_chats.with_chats(e) == ready
    (path,) = ready.data.sources
    assert ready.evaluation is not None and ready.evaluation.sources == (path,)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{model.name} answers 3 prompts ..."
    told = [line for line in said if " wrote " in line]
    assert "wrote 3 chats, " in told[0] and all("wrote before" in line for line in told[1:])
    chats = [list(document.messages) for document in open_documents([path])]
    asked = [[turn["content"] for turn in chat[:-1]] for chat in chats]
    assert asked == [["the cat"], ["the dog"], ["sit", "the log"]]
    assert all(chat[-1]["role"] == "assistant" and chat[-1]["content"] != "old" for chat in chats)
    samples = Samples(dataclasses.replace(ready.data, sources=(path,)), load_tokenizer(model))
    assert len(samples) == 3 and any(sample.learn.any() for sample in samples)


@pytest.mark.slow
@pytest.mark.usefixtures("source")
def test_a_model_without_prompts_writes_those_too(model, monkeypatch, capsys):
    """Once, with `prompts` turns of a user, of which empty ones are left out."""
    monkeypatch.setattr(teacher_chats, "_TURNS", dataclasses.replace(teacher_chats._TURNS, max_tokens=20))
    asked = "self://?prompts=9&max_tokens=3"
    path = teacher_chats.chats_of(str(model), asked)
    said = capsys.readouterr().out.splitlines()
    chats = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert 1 < len(chats) <= 9
    for user, answer in chats:
        assert (user["role"], answer["role"]) == ("user", "assistant") and user["content"].strip()
    assert len({user["content"] for user, _ in chats}) > 1
    assert sum(" wrote " in line for line in said) == 2
    assert teacher_chats.chats_of(str(model), asked) == path
    assert sum("wrote before" in line for line in capsys.readouterr().out.splitlines()) == 2
    assert teacher_chats.chats_of(str(model), f"{asked}&seed=100") != path


@pytest.mark.parametrize("template, close", [(CHATML, "<|end|>"), (INSTRUCT, "[/INST]"), (PLAIN, "\n")])
def test_a_prompt_is_sampled_where_transformers_puts_one(template, close, tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(make_tokenizer(tmp_path, template))
    whole = theirs.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False)
    before, _, after = whole.partition("the cat")
    ids = theirs(before, add_special_tokens=False)["input_ids"]
    assert teacher_chats.user_turn(load_tokenizer(tmp_path)) == (ids, close)
    assert (after.strip() or after) == close


@pytest.mark.parametrize("source", ["self://", "self://prompts.jsonl?prompts=3", "self://?max_tokens=3"])
def test_prompts_are_of_a_file_or_of_the_model(source):
    with pytest.raises(UsageError, match=r"self://\?prompts=2000"):
        teacher_chats.chats_of("model", source)


def test_chats_are_sampled_again_for_other_prompts_sampling_or_weights(model, source, tmp_path, monkeypatch):
    monkeypatch.setattr(
        teacher_chats, "_answers", lambda model, prompts, left, *how: [(i, ("x", 1)) for i in left]
    )
    first = teacher_chats.chats_of(str(model), source)
    assert teacher_chats.chats_of(str(model), source) == first
    other = tmp_path / "other"
    skv.save_pretrained(make_tokenizer(other, CHATML), *tiny(WORDS, skv.KVPlan.standard(4), seed=1))
    found = {
        first,
        teacher_chats.chats_of(str(model), f"{source}&seed=1"),
        teacher_chats.chats_of(str(other), source),
    }
    prompts = Path(source.removeprefix("self://").partition("?")[0])
    prompts.write_text(json.dumps({"prompt": "another"}) + "\n")
    assert len(found | {teacher_chats.chats_of(str(model), source)}) == 4


def test_answers_outlast_a_disk_that_is_full_at_the_end(model, tmp_path, monkeypatch):
    prompts = [[{"role": "user", "content": text}] for text in "abc"]
    asked: list[list[int]] = []

    def answers(_model, _prompts, left, *_how):
        asked.append(list(left))
        return [(number, (f"answer {number}", 2)) for number in left]

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(teacher_chats, "_answers", answers)
    path = tmp_path / "chats.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(UsageError, match="No space left"):
            teacher_chats.write_chats(str(model), prompts, path)
    teacher_chats.write_chats(str(model), prompts, path)
    assert asked == [[0, 1, 2], []]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_answers_end_where_the_context_does(model, tmp_path):
    """A prompt without room for an answer is refused by its number; one with little room gets less."""
    chats = [[{"role": "user", "content": "the cat " * count}] for count in (10, 60)]
    tokenizer, most = load_tokenizer(model), Sampling(max_tokens=1000)
    room = WORDS.max_position_embeddings - len(tokenizer.encode_chat(chats[0], True))
    found = list(teacher_chats._answers(str(model), chats, [0], most, Doing()))
    assert 0 < room < 100 and found[0][0] == 0 and 0 < found[0][1][1] <= room
    with pytest.raises(UsageError, match="prompt 1"):
        teacher_chats.write_chats(str(model), chats, tmp_path / "chats.jsonl", most)


@pytest.mark.slow
def test_an_answer_that_failed_is_not_trained_on(tmp_path):
    student, params = tiny(WORDS, skv.KVPlan.standard(4))
    params["norm"] = params["norm"] * float("nan")
    skv.save_pretrained(make_tokenizer(tmp_path / "broken", CHATML), student, params)
    path = tmp_path / "chats.jsonl"
    with pytest.raises(UsageError, match="NaN"):
        teacher_chats.write_chats(str(tmp_path / "broken"), [[{"role": "user", "content": "the cat"}]], path)
    assert not path.exists()


def test_answers_written_by_a_stopped_run_are_kept(model, tmp_path, monkeypatch):
    prompts = [[{"role": "user", "content": text}] for text in "abc"]
    asked: list[list[int]] = []

    def answers(_model, _prompts, left, *_how):
        asked.append(list(left))
        for number in reversed(left):
            yield number, (f"answer {number}", 2)
            if len(asked) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(teacher_chats, "_answers", answers)
    path = tmp_path / "chats.jsonl"
    with pytest.raises(KeyboardInterrupt):
        teacher_chats.write_chats(str(model), prompts, path)
    assert not path.exists()
    with (tmp_path / "chats.jsonl.part").open("a") as file:
        file.write('[1, "cut')
    assert teacher_chats.write_chats(str(model), prompts, path) == 6 and asked == [[0, 1, 2], [0, 1]]
    rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert [row[0]["content"] + row[1]["content"] for row in rows] == ["aanswer 0", "banswer 1", "canswer 2"]
    assert list(tmp_path.iterdir()) == [path]


def test_sampling_is_read_from_the_source():
    assert teacher_chats.sampling_of("", "x") == Sampling()
    found = teacher_chats.sampling_of("max_tokens=5&temperature=0&top_p=0.5&seed=7", "x")
    assert found == Sampling(max_tokens=5, temperature=0.0, top_p=0.5, seed=7)
