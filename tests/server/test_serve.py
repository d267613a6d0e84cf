"""serve.py end to end on a small model: files in and out, resumed after a kill, bad input refused."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import hf_models
import numpy as np
import pytest
import safetensors.numpy
import transformers

from swiftkv_jax.checkpoint.generation import read_generation_config
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.server.main import main

ROOT = Path(__file__).parents[2]
TEXTS = [f"The function number {i} returns" + " a list of" * (i % 3) for i in range(8)]
FLAGS = ["--max-num-seqs", "2", "--max-model-len", "64", "--max-tokens", "6", "--quiet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model with the demo's tokenizer, as transformers saves it."""
    path = tmp_path_factory.mktemp("model")
    fields = {"vocab_size": 2048, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1}
    hf_models.save(hf_models.build("llama", **fields), path)
    transformers.AutoTokenizer.from_pretrained(ROOT / "demo" / "tokenizer").save_pretrained(path)
    (path / "chat_template.jinja").unlink()
    generation = {"temperature": 0.8, "top_k": 50, "eos_token_id": [1]}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def jsonl(path: Path, rows) -> str:
    """A file of rows as an editor on Windows saves it, with a byte order mark."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8-sig", newline="\r\n")
    return str(path)


def read(path) -> dict[int, dict]:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert len({row["index"] for row in rows}) == len(rows)
    return {row["index"]: row for row in rows}


def answers(rows: dict[int, dict]) -> list[tuple]:
    names = ("token_ids", "text", "finish_reason", "key")
    return [(i, *(row[name] for name in names)) for i, row in sorted(rows.items())]


def batch(folder: Path, source: str, out: Path, *flags: str) -> int:
    return main(["--model", str(folder), "--input", source, "--output", str(out), *FLAGS, *flags])


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """(input file, rows) of a run that nothing interrupts."""
    place = tmp_path_factory.mktemp("whole")
    source = jsonl(place / "in.jsonl", [{"prompt": text} for text in TEXTS])
    assert batch(folder, source, place / "out.jsonl") == 0
    return source, read(place / "out.jsonl")


def test_output_lines_hold_what_llm_generate_gives(folder, whole):
    llm = LLM(folder, max_num_seqs=2, max_model_len=64)
    assert llm.defaults == SamplingParams(temperature=0.8, top_k=50)
    assert read_generation_config(folder).eos_token_ids == llm.eos_ids[-1:]
    params = [llm.defaults.updated({"max_tokens": 6, "seed": i}) for i in range(len(TEXTS))]
    for i, output in enumerate(llm.generate(TEXTS, params, use_tqdm=False)):
        got, want = whole[1][i], output.outputs[0]
        asked = (got["prompt"], got["id"], got["prompt_tokens"])
        assert asked == (TEXTS[i], None, len(output.prompt_token_ids))
        found = (got["text"], got["token_ids"], got["finish_reason"])
        assert found == (want.text, want.token_ids, want.finish_reason)
        timings = got["timings"]
        assert 0 <= timings["queue_s"] < timings["ttft_s"] <= timings["total_s"] and timings["tpot_s"] > 0


KILLER = """
import os, runpy, signal, sys
from swiftkv_jax.server.jobs import Output

write, lines = Output.write, []

def write_some(self, row):
    if len(lines) == 3:
        self._file.write('{"index": 7, "te')
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    lines.append(row)
    write(self, row)

Output.write = write_some
sys.argv = ["serve.py", *sys.argv[1:]]
runpy.run_path("serve.py", run_name="__main__")
"""


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(folder, whole, tmp_path):
    """kill -9 in the middle of a line, then --resume: nothing missing, nothing twice, the same tokens."""
    source, want = whole
    out = tmp_path / "out.jsonl"
    flags = ["--model", str(folder), "--input", source, "--output", str(out), *FLAGS]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", KILLER, *flags], cwd=ROOT, env=here)
    assert killed.returncode == -signal.SIGKILL
    kept = out.read_bytes()
    whole_lines = kept[: kept.rfind(b"\n") + 1]
    assert whole_lines.count(b"\n") == 3 and len(whole_lines) < len(kept)
    assert main([*flags, "--resume"]) == 0
    assert out.read_bytes().startswith(whole_lines)
    assert answers(read(out)) == answers(want)
    finished = out.read_bytes()
    assert main([*flags, "--resume"]) == 0  # nothing left: nothing changes
    assert out.read_bytes() == finished


def test_no_two_completions_of_a_file_share_a_seed(folder, tmp_path):
    rows = [{"prompt": TEXTS[0], "n": 3}, {"prompt": TEXTS[0], "n": 3}, {"prompt": TEXTS[0]}]
    out = tmp_path / "out.jsonl"
    assert batch(folder, jsonl(tmp_path / "in.jsonl", rows), out) == 0
    got = read(out)
    found = [tuple(each["token_ids"]) for i in range(2) for each in got[i]["completions"]]
    assert len({*found, tuple(got[2]["token_ids"])}) == 7


def test_rows_override_flags_and_flags_the_checkpoint(folder, tmp_path, monkeypatch):
    rows = [
        {"prompt": TEXTS[0], "id": "first", "temperature": 0.0, "max_tokens": 2, "note": "kept by the user"},
        {"prompt_token_ids": [5, 6, 7], "id": 2, "n": 2, "logprobs": 1},
    ]
    asked, run, out = [], LLM.run, tmp_path / "out.jsonl"
    monkeypatch.setattr(LLM, "run", lambda self, requests: run(self, asked.extend(requests) or asked))
    assert batch(folder, jsonl(tmp_path / "in.jsonl", rows), out, "--top-k", "3", "--seed", "4") == 0
    params = [(request.params.top_k, request.params.temperature) for request in asked]
    assert params == [(3, 0), (3, 0.8)]
    got = read(out)
    assert (got[0]["id"], len(got[0]["token_ids"])) == ("first", 2)
    assert got[1]["prompt"] is None and got[1]["prompt_token_ids"] == [5, 6, 7]
    assert len(got[1]["completions"]) == 2 and got[1]["completions"][0]["text"] == got[1]["text"]
    entries = [entry for each in got[1]["logprobs"] for entry in each.values()]
    assert all(set(entry) == {"logprob", "rank", "decoded_token"} for entry in entries)


def test_stdin_to_stdout(folder, whole, monkeypatch, capsys):
    lines = f"\ufeff{TEXTS[0]}\n{json.dumps({'prompt': TEXTS[1]})}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["--model", str(folder), "--input", "-", "--output", "-", *FLAGS]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert answers({row["index"]: row for row in rows}) == answers(whole[1])[:2]


BROKEN = [
    '{"prompt": "good"}',
    '{"prompt": "torn',
    "[1, 2]",
    '{"text": "a"}',
    '{"prompt": "a", "max_token": 3}',
    '{"prompt": "a", "temperature": NaN}',
    '{"prompt": ""}',
    '{"prompt_token_ids": [2048]}',
    '{"messages": [{"role": "user", "content": "a"}]}',
    '{"prompt": "a", "id": [1]}',
    '{"prompt": "\\ud800"}',
    '{"prompt": "a", "max_tokens": 99}',
    '{"prompt": "good too"}',
]


def test_broken_lines_are_all_named_or_skipped(folder, tmp_path, capsys):
    source, out = jsonl(tmp_path / "in.jsonl", BROKEN), tmp_path / "out.jsonl"
    assert batch(folder, source, out) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and not out.exists()
    for number in range(1, 14):
        assert (f"line {number}: " in message) == (1 < number < 13)
    assert batch(folder, source, out, "--skip-bad-lines") == 0
    assert sorted(read(out)) == [0, 12]


def test_an_output_that_is_not_ours_is_left_alone(folder, whole, tmp_path):
    out = tmp_path / "out.jsonl"
    other = '{"index": 3, "key": "0"}\n'
    for held, more in (("precious\n", []), ("precious\n", ["--resume"]), (other, ["--resume"])):
        out.write_text(held)
        assert batch(folder, whole[0], out, *more) == 2 and out.read_text() == held


@pytest.mark.parametrize(
    "words",
    "--max-token 3|--max-tokens many|--max-tokens 0|--temperature nan|--input absent.jsonl|--model ./nowhere|"
    "--dtype int8|--max-model-len 999|--kernels chunk=pallas_tpu|--kernels pallas_gpv|--resume|"
    "--output /nowhere/out.jsonl".split("|"),
)
def test_bad_flags_exit_with_2_and_one_line(folder, words, capsys):
    """They name the flag, or its field, or what it was given."""
    flags = words.split()
    given = flags if "--model" in flags else ["--model", str(folder), *flags]
    assert main([*given, "--quiet"]) == 2
    out, err = capsys.readouterr()
    names = (flags[0], flags[0].lstrip("-").replace("-", "_"), flags[-1].lstrip("./"), "pallas_gpu")
    assert any(name in err for name in names)
    assert err.startswith("error: ") and err.count("\n") == 1 and not out


def test_a_full_disk_is_one_line_and_a_device_may_take_the_answers(folder, tmp_path, capsys):
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}])
    assert batch(folder, source, Path("/dev/full")) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "/dev/full" in said and said.count("\n") == 1
    assert batch(folder, source, Path("/dev/null")) == 0


def test_a_model_without_a_tokenizer_serves_token_ids_and_refuses_texts(folder, tmp_path, capsys):
    bare, out = tmp_path / "bare", tmp_path / "out.jsonl"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, bare / name)
    rows = [{"prompt_token_ids": [5, 6, 7]}, {"prompt": "The"}, {"messages": [{"role": "user"}]}]
    assert batch(bare, jsonl(tmp_path / "in.jsonl", rows), out) == 2
    said = capsys.readouterr().err
    assert "line 2: " in said and "line 3: " in said and "line 1: " not in said and not out.exists()
    assert batch(bare, jsonl(tmp_path / "in.jsonl", rows[:1]), out) == 0
    (row,) = read(out).values()
    assert len(row["token_ids"]) == 6 and row["text"] == ""


def test_a_batch_of_which_prompts_fail_ends_with_1(folder, tmp_path, capsys):
    """NaN in the weights: no token came, so there is no time to the first one."""
    spoilt, out = shutil.copytree(folder, tmp_path / "spoilt"), tmp_path / "out.jsonl"
    weights = safetensors.numpy.load_file(spoilt / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * np.nan
    safetensors.numpy.save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    assert batch(spoilt, jsonl(tmp_path / "in.jsonl", [{"prompt": "one"}, {"prompt": "two"}]), out) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: 2 of 2 prompts failed")
    assert [row["timings"]["ttft_s"] for row in read(out).values()] == [None, None]
    assert {row["finish_reason"] for row in read(out).values()} == {"error"}
