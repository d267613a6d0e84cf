"""`swiftkv eval MODEL --tasks ... --files DIR`: every checker on both sides of its law, files, scores, runs
of a small model: HellaSwag by transformers' logits, and what a stopped run goes on from."""

# ruff: noqa: RUF001 (letters of other scripts)

import json
import re
from pathlib import Path

import numpy as np
import pytest

from swiftkv_jax.cli.tasks import main, report
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.tasks.ifeval import CHECKERS, checkable, followed
from swiftkv_jax.tasks.items import TASKS, items_of, number_of
from swiftkv_jax.tasks.retrieval import made
from swiftkv_jax.tasks.words import capitals, language, sentences

TEACHER = Path(__file__).resolve().parents[1] / "demo" / "teacher"
SECOND = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Fire"}
PARTS = {"section_spliter": "PART", "num_sections": 2}
# Instruction, what the data gives, an answer that follows, one that does not.
LAWS = [
    ("keywords:existence", {"keywords": ["sea", "lamp"]}, "A Lamp by the sea.", "A lamp by the lake."),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "at least"}, "Sea, sea", "A sea"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "less than"}, "A sea", "Sea, sea"),
    ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, "The seaside.", "The Sea!"),
    ("keywords:letter_frequency", {"letter": "Q", "let_frequency": 2, "let_relation": "at least"}, "Qq", "Q"),
    ("language:response_language", {"language": "de"}, "Der Hund ist nicht hier.", "The dog is not here."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "Go.", "Go. Go."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", "One\n***\n***\nTwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one-two on", "one two!"),
    ("length_constraints:nth_paragraph_first_word", SECOND, "Water.\n\n'fire, then.", "Fire.\n\nWater."),
    ("length_constraints:nth_paragraph_first_word", SECOND, "Water.\n\nFIRE!", "Water.\n\nFire!\n\nAir."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [place]", "[name], (place)"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Yes.\nP. S. No.", "Yes. PS: no."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Yes.\np.p.s. No.", "Yes.\nP.S. No."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n - b\n- c"),
    ("detectable_format:constrained_response", {}, "Well: My answer is no.", "My answer is nothing."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a b*, **c**", "*a b*, **"),
    ("detectable_format:multiple_sections", PARTS, "PART 1\na\nPART 2\nb", "PART 1\na\nPart 2\nb"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', '{"a": 1'),
    ("detectable_format:title", {}, "<<The sea>>\nIt is wide.", "<< >>\nIt is <wide>."),
    ("combination:two_responses", {}, "One\n******\nTwo", "One\n******\nOne"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, " say it. Yes.", "Yes. Say it."),
    ("startend:end_checker", {"end_phrase": "the end."}, 'So. "The End."', "The end. So."),
    ("startend:quotation", {}, '"So\nit is."', '"So" it is.'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": "at least"},
        "NASA: WELL-KNOWN, I think",
        "NASA, Well-Known, I think",
    ),
    ("change_case:english_capital", {}, "THE SEA IS WIDE.", "THE SEA is WIDE."),
    ("change_case:english_capital", {}, "THE SEA IS WIDE.", "DAS MEER IST NICHT ENG UND DIE KÜSTE IST WEIT."),
    ("change_case:english_lowercase", {}, "the sea is wide.", "The sea is wide."),
    ("change_case:english_lowercase", {}, "the sea is wide.", "el mar es ancho y la costa no se ve."),
    ("punctuation:no_comma", {}, "So it is.", "So, it is."),
]


@pytest.mark.parametrize("name, given, follows, breaks", LAWS)
def test_a_checker_tells_an_answer_that_follows_from_one_that_does_not(name, given, follows, breaks):
    assert followed(follows, [name], [given]) == [True]
    assert followed(breaks, [name], [given]) == [False]


def test_every_checker_has_a_law_and_none_is_followed_by_silence():
    assert {name for name, *_ in LAWS} == CHECKERS.keys() and len(CHECKERS) == 25
    assert not any(
        followed(" \n", [name], [given], loose)[0] for name, given, *_ in LAWS for loose in (True, False)
    )


@pytest.mark.parametrize(
    "answer", ["Sure, here:\nno", "no\nDone, I hope.", "Sure,\nno\nDone,", "Sure,\n*n*o"]
)
def test_loose_leaves_out_the_first_line_the_last_or_asterisks(answer):
    asked = ["punctuation:no_comma", "startend:end_checker"], [{}, {"end_phrase": "no"}]
    assert not all(followed(answer, *asked)) and all(followed(answer, *asked, loose=True))


def test_sentences_and_capitals_as_the_public_splitters_count_them():
    text = (
        'Mr. Brown, 64.5 years old, met J. K. Rowling at 6 p.m. today! "Did he?" No. It was on a U.S. ship.'
    )
    assert sentences(text) == 4 and sentences("") == 0 and sentences("No end") == 1
    assert capitals("DON'T ask I'LL, the U.S. (NASA) and HTML-5 or Rome") == 7


@pytest.mark.parametrize(
    "code, text",
    [
        ("en", "It is not the sea."),
        ("it", "Il cane non è sul tavolo."),
        ("pt", "O cachorro não está na mesa."),
        ("fi", "Koira on talossa, mutta hän ei ole."),
        ("vi", "Con chó không ở trên bàn của tôi."),
        ("sw", "Mbwa hayuko kwenye meza ya mtu wa kijiji."),
        ("ru", "Я не знаю, что это такое."),
        ("bg", "Аз не знам какво е това, но се радвам."),
        ("fa", "سگ در خانه است و این را می بیند."),
        ("ur", "کتا میز پر نہیں ہے اور بلی سو رہی ہے۔"),
        ("ar", "الكلب ليس في البيت الذي على التل."),
        ("hi", "कुत्ता मेज पर नहीं है और यह अच्छा है।"),
        ("mr", "कुत्रा टेबलावर नाही आणि हे चांगले आहे."),
        ("ne", "कुकुर टेबुलमा छैन र यो राम्रो छ।"),
        ("th", "สุนัขไม่อยู่บนโต๊ะ"),
        ("ko", "개는 탁자 위에 없다."),
    ],
)
def test_a_language_is_told_by_its_script_or_its_commonest_words(code, text):
    assert language(text) == code and language("12 + 3 = 15") is None


def test_what_no_checker_knows_is_left_out():
    assert checkable(["language:response_language"], [{"language": "sw"}])
    assert not checkable(["language:response_language"], [{"language": "eo"}])
    assert not checkable(["punctuation:no_comma", "count:pronouns"], [{}, {}])


@pytest.mark.parametrize(
    "text, number",
    [
        ("so 1,234.5 and then $2,000.", "2000"),
        ("#### -7", "-7"),
        ("9 apples", "9"),
        ("none", ""),
        ("It is 3.", "3"),
    ],
)
def test_the_last_number_is_the_answer(text, number):
    assert number_of(text) == number


ENDINGS = [
    " walks to the shore and looks.",
    " the the the.",
    " eats.",
    " is a function that returns a value.",
]
HELLASWAG = [
    {"ctx": "Sailing: The keeper of the lamp", "label": "0", "endings": [e.strip() for e in ENDINGS]},
    {"ctx": "Python: The module", "label": "3", "endings": [e.strip() for e in reversed(ENDINGS)]},
    {"ctx": "Sleep: A dog", "label": "1", "endings": [e.strip() for e in ENDINGS]},
]
IFEVAL = [
    {"prompt": "Say it.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    {
        "prompt": "Write two words.",
        "instruction_id_list": ["length_constraints:number_words", "startend:quotation"],
        "kwargs": [{"num_words": 2, "relation": "at least"}, {"num_words": None}],
    },
    {"prompt": "Say it in Esperanto.", "instruction_id_list": ["language:response_language"]}
    | {"kwargs": [{"language": "eo"}]},
]
GSM8K = [
    {"question": "What is 1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"},
    {"question": "What is 3 times 1,000?", "answer": "#### 3,000"},
]


def written(folder: Path, name: str, rows: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def data(tmp_path) -> Path:
    folder = written(tmp_path / "data", "ifeval.jsonl", IFEVAL)
    lines = [[row["ctx"], row["label"], *row["endings"]] for row in HELLASWAG]
    (folder / "hellaswag_val_full.txt").write_text("".join(f"{line}\n" for each in lines for line in each))
    return written(folder, "test.jsonl", GSM8K)


def test_published_forms_of_a_file_are_read_alike(data, tmp_path):
    text = items_of("hellaswag", data)
    label, context = HELLASWAG[0]["ctx"].split(": ")
    other = [HELLASWAG[0] | {"activity_label": label, "ctx_a": "The keeper [x] of", "ctx_b": "the Lamp"}]
    rows = items_of("hellaswag", written(tmp_path / "rows", "hellaswag_val.jsonl", other))
    assert [TASKS["hellaswag"].asked(item).endings for item in text] == [row["endings"] for row in HELLASWAG]
    assert TASKS["hellaswag"].asked(rows[0]).context == "Sailing: The keeper of The lamp"
    assert TASKS["hellaswag"].asked(text[0]).context == f"Sailing: {context}"
    assert TASKS["gsm8k"].scores(items_of("gsm8k", data)[0], "So $2.00, or 2.") == {"exact match": (1, 1)}
    assert TASKS["gsm8k"].scores(items_of("gsm8k", data)[1], "3000 and 1") == {"exact match": (0, 1)}
    likelihoods = [-9.0, -8.0, -5.0, -30.0]  # the third is the likeliest, the first one by character
    assert TASKS["hellaswag"].scores(text[0], likelihoods) == {"acc": (0, 1), "acc_norm": (1, 1)}
    with pytest.raises(UsageError, match=r"item 1: no answer"):
        items_of("gsm8k", written(tmp_path / "broken", "gsm8k_test.jsonl", [{"question": "x"}]))
    lines = (data / "hellaswag_val_full.txt").read_text().split("\n")
    (data / "hellaswag_val_full.txt").write_text("\n".join(lines[1:]))
    with pytest.raises(UsageError, match=r"item 1: no index"):
        items_of("hellaswag", data)


def test_one_line_of_a_made_prompt_has_the_answer_at_its_depth():
    """By reading the text: of its lines one has the key, at the depth; others keep to the kind; the text
    fills the length but for a line."""
    lengths = (150, 400)
    items = made(lengths, 40, lambda text: len(text.split()))
    assert items == made(lengths, 40, lambda text: len(text.split()))
    assert len({(item["kind"], item["length"], item["depth"]) for item in items}) == 20
    for item in items:
        *lines, empty, question = item["prompt"].split("\n")
        key = re.fullmatch(r"What is the code of (.+)\? Answer with the code alone\.", question)[1]
        told = [re.fullmatch(r"The code of (.+) is (\d{5})\.", line) for line in lines]
        (place,) = [number for number, found in enumerate(told) if found and found[1] == key]
        assert (
            not empty and told[place][2] == item["code"] and place == round(item["depth"] * (len(lines) - 1))
        )
        assert sum(map(bool, told)) == (1 if item["kind"] == "needle" else len(lines))
        assert len({found[1] for found in told if found}) == sum(map(bool, told)), "each key once"
        assert item["length"] - 11 < len(item["prompt"].split()) <= item["length"]
        measure = f"{item['kind']}, {item['length']} tokens"
        assert TASKS["retrieval"].scores(item, f"It is {item['code']}.") == {measure: (1, 1)}
        assert TASKS["retrieval"].scores(item, f"It is {told[place - 1] and told[place - 1][2]}.") == {
            measure: (0, 1)
        }
    by_round = [len({items[n + i]["length"] for i in range(2)}) for n in range(0, 40, 2)]
    assert set(by_round) == {2}, "the first items have all lengths"


def test_retrieval_is_reported_by_kind_and_length():
    """Of each the student's share, the teacher's, and the paired difference; errors over its own items."""
    items = made((150, 400), 8, len)
    student = [
        TASKS["retrieval"].scores(item, item["code"] * (number != 1)) for number, item in enumerate(items)
    ]
    teacher = [TASKS["retrieval"].scores(item, item["code"]) for item in items]
    lines = report("retrieval", ["runs/mine/export", "teacher"], [student, teacher]).splitlines()
    assert lines[0].split()[1:5] == ["8", "items", "mine", "teacher"]
    assert [line.split()[:2] for line in lines[1:]] == [
        [f"{kind},", length] for kind in ("needle", "key-value") for length in ("150", "400")
    ]
    assert re.findall(r"[-+]?\d\.\d{3}", lines[1]) == ["1.000", "0.000", "1.000", "0.000", "+0.000", "0.000"]
    assert re.findall(r"[-+]?\d\.\d{3}", lines[2]) == ["0.500", "0.500", "1.000", "0.000", "-0.500", "0.500"]


@pytest.mark.parametrize(
    "words, named",
    [
        (["--tasks", "gsm8k", "--files", "{empty}"], "gsm8k_test.jsonl"),
        (["--tasks", "ifevl", "--files", "{data}"], "'ifeval'"),
        (["--tasks", "ifeval", "--files", "{data}", "--tokens", "99999"], "--tokens"),
        (["--tasks", "ifeval"], "--files"),
        (["--tasks", "retrieval", "--lengths", "2k"], "2k"),
        (["--tasks", "retrieval", "--lengths", "9999"], "--tokens"),
        (["--tasks", "ifeval", "--files", "{data}", "--against", "{other}"], "prompt 0"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(words, named, data, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    for path in TEACHER.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    places = {"empty": tmp_path / "none", "data": data, "other": other}
    assert main([str(TEACHER), *(word.format(**places) for word in words)]) == 2
    said = capsys.readouterr().err
    assert named in said and len(said.strip().splitlines()) == 1


def run(capsys, data: Path, *words: str) -> list[str]:
    """The lines of the results that are printed."""
    tasks = ["--tasks", "ifeval,gsm8k,retrieval,hellaswag", "--files", str(data), "--tokens", "12"]
    tasks += ["--lengths", "150,300", "--count", "8"]
    assert main([str(TEACHER), *tasks, *words]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if "±" in line or "left out" in line]


@pytest.mark.slow
def test_choices_are_those_of_transformers_and_a_stopped_run_goes_on(data, tmp_path, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    told = run(capsys, data, "--against", str(TEACHER), "--out", str(whole))
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    tokenizer, model = AutoTokenizer.from_pretrained(TEACHER), AutoModelForCausalLM.from_pretrained(TEACHER)

    def value(context: str, ending: str) -> float:
        given, ids = tokenizer(context)["input_ids"], tokenizer(context + ending)["input_ids"]
        with torch.inference_mode():
            scores = model.float()(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(scores[at - 1, ids[at]]) for at in range(len(given), len(ids)))

    chosen = [row for row in rows if row["task"] == "hellaswag"]
    for row, item in zip(chosen, HELLASWAG, strict=False):
        want = [value(item["ctx"], f" {ending}") for ending in item["endings"]]
        assert row["answer"] == pytest.approx(want, abs=1e-3)
        by_length = [x / len(ending) for x, ending in zip(want, item["endings"], strict=True)]
        right = [int(np.argmax(x)) == int(item["label"]) for x in (want, by_length)]
        assert row["scores"] == {"acc": [right[0], 1], "acc_norm": [right[1], 1]}

    for row in (row for row in rows if row["task"] == "retrieval"):
        turn = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        assert 0 <= (150, 300)[row["item"] % 2] - (len(ids) + 12) < 40, "prompt and answer fill the length"

    assert "1 items are left out" in told[0]
    assert all(re.search(r"\+0\.000 ± 0\.000$", line) for line in told[1:]), (
        "the same model, so no difference"
    )
    counts = [sum(row["task"] == name for row in rows) for name in TASKS]
    assert counts == [2, 2, 3, 8], "answered once, for both"

    first = whole.read_text().splitlines()
    part.write_text("\n".join([*first[:12], first[12][:20]]))
    asked = []
    monkeypatch.setattr(
        "swiftkv_jax.cli.tasks.answered", lambda llm, asked_, doing: asked.extend(asked_) or iter(())
    )
    assert run(capsys, data, "--against", str(TEACHER), "--out", str(part)) == told
    assert not asked, "what is in the file is not generated again"
    again = [json.loads(line) for line in part.read_text().splitlines() if line.endswith("}")]
    assert again == rows
