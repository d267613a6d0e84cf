"""`swiftkv eval STUDENT --against TEACHER`: transformers' greedy answers and likelihoods, and refusals."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.cli.answering import ask
from swiftkv_jax.cli.answers import main
from swiftkv_jax.cli.convert import convert
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.distill import answers
from swiftkv_jax.distill.answers import Answers, compared
from swiftkv_jax.distill.config import Experiment, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig
from swiftkv_jax.distill.loop import opened
from swiftkv_jax.text.tokenizer import load_tokenizer

TEACHER = Path(__file__).resolve().parents[1] / "demo" / "teacher"
TEXT = "The lighthouse keeper walked down to the shore and looked at the boats. " * 8
ROWS = [
    {"prompt": "Tell me about the sea."},
    {
        "messages": [
            {"role": "user", "content": "What is a lamp?"},
            {"role": "assistant", "content": "A light."},
        ]
    },
    {"text": TEXT},
]


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def figures(printed: str) -> dict[str, list[float]]:
    """Name -> the numbers of its line."""
    lines = (line for line in printed.splitlines() if "±" in line and "prompts" not in line)
    return {line[:28].strip(): [float(x) for x in re.findall(r"-?\+?\d+\.\d+", line[28:])] for line in lines}


@pytest.mark.slow
def test_answers_and_nats_are_those_of_transformers(tmp_path, prompts, capsys):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    student = tmp_path / "student"
    convert(str(TEACHER), PlanConfig(split=3, init="least_squares", init_tokens=8192), student, length=128)
    capsys.readouterr()
    out = tmp_path / "pairs.jsonl"
    words = ["--against", str(TEACHER), "--prompts", prompts, "--tokens", "24", "--out", str(out)]
    assert main([str(student), *words]) == 0
    printed = figures(capsys.readouterr().out)
    pairs = [json.loads(line) for line in out.read_text().splitlines()]

    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()

    def nats(prompt: list[int], answer: list[int]) -> float:
        with torch.inference_mode():
            scores = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        return -float(np.mean([scores[len(prompt) + i - 1, token] for i, token in enumerate(answer)]))

    served, greedy, found = skv.LLM(student), skv.SamplingParams(temperature=0.0, max_tokens=24), []
    for row, pair in zip(ROWS, pairs, strict=True):
        if "text" in row:
            ids = tokenizer(row["text"])["input_ids"][: answers.BEGINNING]
        else:
            chat = row.get("messages", [{"role": "user", "content": row.get("prompt")}])[:1]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        with torch.inference_mode():
            own = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
        assert tokenizer.decode(own, skip_special_tokens=True) == pair["teacher"]
        its = served.generate({"prompt_token_ids": ids}, greedy)[0].outputs[0]
        assert its.text == pair["student"]
        found.append((nats(ids, own.tolist()), nats(ids, list(its.token_ids))))
    want = np.mean(found, 0)
    assert printed["teacher's nats per token"][:3] == pytest.approx([*want, want[1] - want[0]], abs=1e-3)


def test_figures_of_answers_written_by_hand():
    same, other = [1, 2, 3, 4] * 5, [1, 2, 3, 4] * 4 + [9, 9, 9, 9]
    teacher = Answers([same, [5, 6]], ["", ""], [1.0, 2.0])
    student = Answers([other, [5, 6]], ["", ""], [1.5, 2.0])
    equal, found, pairs = compared(teacher, student, ["a", "b"], 64)
    assert equal == {16: (1.0, 0.0), 64: (0.5, 0.5)} and [pair["prompt"] for pair in pairs] == ["a", "b"]
    assert found["teacher's nats per token"] == pytest.approx((1.5, 1.75, 0.25, 0.25))
    # 17 four-grams, of which 4 are new; of the other, 4 and those with a 9 in them.
    assert found["repeated 4-grams"] == pytest.approx((13 / 34, 9 / 34, -2 / 17, 2 / 17))
    assert found["tokens"] == pytest.approx((11, 11, 0, 0))


def test_a_share_of_parts_has_the_error_of_its_wholes():
    """Of 2, 1 and 1 instructions 2, 0 and 1 are followed: beside the share of 3/4 they are 1/2, -3/4, 1/4."""
    assert answers.mean([2.0, 0.0, 1.0], [2.0, 1.0, 1.0]) == pytest.approx((0.75, np.sqrt(0.875 * 3 / 2) / 4))
    assert answers.mean([2.0, 0.0, 1.0]) == pytest.approx((1, np.sqrt(1 / 3)))


@pytest.mark.slow
def test_a_run_answers_held_out_prompts_as_its_export_does(tmp_path):
    """Chats by their template up to the last question, documents by their beginnings; in the report too."""
    path = tmp_path / "data.jsonl"
    rows = [{"text": f"{number} {TEXT}"} for number in range(4)] + [ROWS[1]] * 3
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(sources=(str(path),), seq_len=48, batch_size=2)
    plan = PlanConfig(split=2, init="fold")
    e = Experiment(name="x", model=str(TEACHER), plan=plan, data=data, evaluation=data, dtype="float32")
    e = dataclasses.replace(e, steps=1, evaluation_batches=1, answers=7, export_dtype="float32")
    out, said = tmp_path / "run", []
    with opened(e, out, say=said.append) as run:
        found = run.go(partial(ask, say=said.append)).answers
    assert found is not None and found.equal[16][0] < 1 and found.report() in said
    tokenizer, served = load_tokenizer(TEACHER), skv.LLM(out / "export", dtype="float32")
    greedy = skv.SamplingParams(temperature=0.0, max_tokens=24)
    document = tokenizer.encode(rows[0]["text"])[:24]
    chat = tokenizer.encode_chat(ROWS[1]["messages"][:1], True)
    for ids, pair in ((document, found.pairs[0]), (chat, found.pairs[-1])):
        assert pair["prompt"] == tokenizer.decode(ids)
        assert pair["student"] == served.generate({"prompt_token_ids": ids}, greedy)[0].outputs[0].text
    assert found.figures["teacher's nats per token"].difference > 0
    last = found.report().splitlines()[-1]
    assert all(last in (out / name).read_text() for name in ("report.md", "export/README.md"))
    assert json.loads((out / "answers.json").read_text())["pairs"] == found.pairs


def test_an_engine_that_fails_is_one_line_and_without_prompts_there_is_none(tmp_path):
    path, said = tmp_path / "data.jsonl", []
    path.write_text(json.dumps({"text": TEXT}) + "\n")
    data, tokenizer = DataConfig(sources=(str(path),), seq_len=48, batch_size=1), load_tokenizer(TEACHER)

    def fails(*_args):
        raise UsageError("no room for pages")

    student = skv.Transformer(skv.ModelConfig.from_hf(TEACHER), skv.KVPlan.standard(8))
    models = answers.StudentAndTeacher(student, {}, TEACHER, tokenizer)
    assert answers.to_held_out(fails, models, data, 2, said.append) is None
    assert len(said) == 1 and "no room for pages" in said[0]
    assert answers.to_held_out(fails, models, data, 0, said.append) is None and len(said) == 1


def test_held_out_prompts_come_from_all_documents_and_leave_room(tmp_path):
    path = tmp_path / "data.jsonl"
    long = {"messages": [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "A."}]}
    rows = [{"text": f"{number} {TEXT}"} for number in range(8)] + [long]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, tokenizer = DataConfig(sources=(str(path),), seq_len=100, batch_size=1), load_tokenizer(TEACHER)
    prompts = answers.held_out(data, tokenizer, 3, 50)
    assert [tokenizer.decode(ids)[:2] for ids in prompts] == ["0 ", "3 ", "6 "], "and not the long chat"
    assert {len(ids) for ids in prompts} == {50}
    longer = dataclasses.replace(data, seq_len=2048)
    assert [len(ids) for ids in answers.held_out(longer, tokenizer, 9, 50)][:8] == [answers.BEGINNING] * 8
    assert len(answers.held_out(longer, tokenizer, 9, 50)) == 9, "and the chat, whole"


@pytest.mark.parametrize(
    "rows, flags, named",
    [
        ([{"messages": [{"role": "assistant", "content": "I."}]}], [], "prompts.jsonl:1"),
        (ROWS, ["--tokens", "99999"], "--tokens"),
        (ROWS, ["--count", "0"], "--count"),
    ],
    ids=["no_user", "too_long", "none"],
)
def test_wrong_usage_names_what_is_wrong(tmp_path, capsys, rows, flags, named):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(TEACHER), "--against", str(TEACHER), "--prompts", str(path), *flags]) == 2
    assert named in capsys.readouterr().err


def test_models_that_read_prompts_differently_are_refused(tmp_path, capsys, prompts):
    other = tmp_path / "other"
    other.mkdir()
    for path in TEACHER.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert main([str(other), "--against", str(TEACHER), "--prompts", prompts]) == 2
    assert "prompt 0" in capsys.readouterr().err
