"""serve.py with lines of sound: what `LLM.transcribe` gives, line by line; bad lines are named."""

import json
from pathlib import Path

import encoder_models
import pytest
import tokenizers_made
import transformers

from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.speech import GREEDY
from swiftkv_jax.server.main import main

FLAGS = ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--page-size", "8"]
SOUNDS = {"short.wav": 0.7, "long.wav": 2.4, "other.wav": 1.0}
GIVEN = {"other.wav": (8000, 2)}  # rate and channels; else 16,000 and 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Whisper with windows of 1 s and three languages, and a tokenizer."""
    path = encoder_models.save("whisper", tmp_path_factory.mktemp("whisper"))
    transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1).save_pretrained(path)
    return tokenizers_made.make_tokenizer(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder of sounds, in which the lines lie too."""
    path = tmp_path_factory.mktemp("sounds")
    for seed, (name, seconds) in enumerate(SOUNDS.items()):
        (path / name).write_bytes(encoder_models.wav(seconds, seed, *GIVEN.get(name, (16_000, 1))))
    return path


def lines(place: Path, rows, name: str = "in.jsonl") -> str:
    (place / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(place / name)


def served(model: Path, place: Path, rows, *flags: str) -> tuple[int, list[dict]]:
    """(exit code, output lines in the input's order) of a run."""
    out = place / "out.jsonl"
    given = ["--model", str(model), "--input", lines(place, rows), "--output", str(out)]
    code = main([*given, *FLAGS, *flags])
    found = map(json.loads, out.read_text().splitlines()) if out.exists() else ()
    return code, sorted(found, key=lambda row: row["index"])


ROWS = [
    {"audio": "short.wav", "language": "German", "id": "a"},
    {"audio": "long.wav", "language": "en", "task": "translate"},
    {"audio": "other.wav"},
    {"audio": "long.wav", "language": "fr", "max_tokens": 3, "logprobs": 0},
]


def test_lines_of_sound_are_transcribed(folder, place):
    """Paths lie beside the lines; a language that nobody gives is the one that the model hears."""
    code, rows = served(folder, place, ROWS)
    assert code == 0
    llm = LLM(folder, max_num_seqs=4, max_num_batched_tokens=16, page_size=8)
    asked = [("de", "transcribe", None), ("en", "translate", None), (None, "transcribe", None)]
    asked.append(("fr", "transcribe", GREEDY.updated({"max_tokens": 3})))
    for source, row, given in zip(ROWS, rows, asked, strict=True):
        want = llm.transcribe(place / source["audio"], *given)
        ids = [token for window in want.windows for token in window.outputs[0].token_ids]
        assert ids and (row["token_ids"], row["text"]) == (ids, want.text)
        assert (row["audio"], row["language"], row["task"]) == (source["audio"], want.language, given[1])
        assert (row["rate"], row["channels"]) == GIVEN.get(source["audio"], (16_000, 1))
        assert (want.rate, want.channels) == (row["rate"], row["channels"])
        assert row["duration"] == want.duration == SOUNDS[source["audio"]] and row["id"] == source.get("id")
        assert 0 <= row["timings"]["queue_s"] < row["timings"]["ttft_s"] <= row["timings"]["total_s"]
        assert row["prompt_tokens"] == sum(len(window.prompt_token_ids) for window in want.windows)
    assert len(rows[1]["token_ids"]) > 3 * 3 == len(rows[3]["token_ids"]) == len(rows[3]["logprobs"])
    assert rows[3]["finish_reason"] == "length"


def test_a_run_that_was_interrupted_is_finished_and_a_sound_that_changed_is_noticed(folder, place, tmp_path):
    (tmp_path / "a.wav").write_bytes(encoder_models.wav(0.5))
    rows = [{"audio": str(place / "short.wav"), "language": "de"}, {"audio": "a.wav", "language": "de"}]
    code, whole = served(folder, tmp_path, rows)
    assert code == 0
    out = tmp_path / "out.jsonl"
    out.write_text(json.dumps(whole[1]) + '\n{"index": 0, "te')
    code, again = served(folder, tmp_path, rows, "--resume", "--quiet")
    assert code == 0 and [row["token_ids"] for row in again] == [row["token_ids"] for row in whole]
    (tmp_path / "a.wav").write_bytes(encoder_models.wav(0.5, seed=9))
    assert served(folder, tmp_path, rows, "--resume", "--quiet")[0] == 2


BAD = {
    '{"prompt": "hello"}': "whisper",
    '{"audio": "short.wav", "prompt": "hello"}': "prompt",
    '{"audio": "absent.wav"}': "absent.wav",
    '{"audio": "."}': "audio .",
    '{"audio": "in.jsonl"}': "audio in.jsonl",
    '{"audio": "silent.wav"}': "audio silent.wav",
    '{"audio": "nan.wav"}': "audio nan.wav",
    '{"audio": 5}': "audio",
    '{"audio": "a\\u0000b"}': "audio",
    '{"audio": "short.wav", "language": "Klingon"}': "language",
    '{"audio": "short.wav", "language": 5}': "language",
    '{"audio": "short.wav", "language": "de", "task": "sing"}': "task",
    '{"audio": "short.wav", "n": 2}': "n must be",
    '{"audio": "short.wav", "temperature": 9}': "temperature",
    '{"audio": "short.wav", "language": "de", "max_tokens": 99}': "max_tokens",
}


def test_bad_lines_are_all_named_or_skipped(folder, place, tmp_path, capsys):
    for name in SOUNDS:
        (tmp_path / name).write_bytes((place / name).read_bytes())
    (tmp_path / "nan.wav").write_bytes(encoder_models.wav_with_nan())
    (tmp_path / "silent.wav").write_bytes(encoder_models.wav(0.0))
    rows = [*map(json.loads, BAD), {"audio": "short.wav", "language": "de"}]
    assert served(folder, tmp_path, rows, "--quiet") == (2, [])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for number, name in enumerate(BAD.values(), 1):
        assert name in said.partition(f"line {number}: ")[2].partition("line ")[0], (name, said)
    code, found = served(folder, tmp_path, rows, "--quiet", "--skip-bad-lines")
    assert code == 0 and [row["index"] for row in found] == [len(BAD)]
