"""`swiftkv distil`: without a config file it ends with a student that answers."""

import dataclasses
import json
from pathlib import Path

import made
import pytest
from tokenizers_made import CHATML

import swiftkv_jax as skv
from swiftkv_jax.cli import distil, plan
from swiftkv_jax.cli.distil import Machine
from swiftkv_jax.distill.config import PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig
from swiftkv_jax.distill.data.samples import Samples
from swiftkv_jax.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ROOT / "swiftkv_jax" / "configs" / "architectures"
CPU, SLICE = Machine(platform="cpu", devices=1), Machine(platform="tpu", devices=16)
FEWER = ["--set", "plan.init_tokens=400", "--set", "evaluation_batches=1", "--set", "log_every=1"]
FEWER += ["--set", "answers=0"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return made.teacher(tmp_path_factory.mktemp("teacher"), CHATML)


def test_one_distil_command_makes_a_student(teacher, tmp_path):
    data, out = made.texts(tmp_path / "rows.jsonl"), tmp_path / "run"
    words = [str(teacher), "--data", data, "--out", str(out), "--split", "2", "--share", "2"]
    words += ["--length", "24", "--set", "optimizer.clip=0.5", "--steps", "2", *FEWER]
    assert distil.main(words) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["plan"]["split"], config["plan"]["share"], config["steps"]) == (2, 2, 2)
    assert (config["data"]["split"], config["evaluation"]["split"]) == ("train", "held_out")
    assert config["optimizer"]["clip"] == 0.5 and config["export_dtype"] == "bfloat16"
    assert "| teacher |" in (out / "report.md").read_text() and (out / "export" / "README.md").exists()
    student, params = skv.from_pretrained(out / "export")
    assert student.plan == skv.KVPlan.swiftkv(4, 2, 2) and params["embed"].dtype == "bfloat16"
    assert distil.main(words) == 2, "it holds a run already"


@pytest.mark.slow
def test_auto_uses_the_reported_split_and_a_resumed_run_keeps_it(teacher, tmp_path, capsys):
    data, out = made.texts(tmp_path / "rows.jsonl"), tmp_path / "run"
    words = [str(teacher), "--data", data, "--out", str(out), "--steps", "1", "--length", "24", *FEWER]
    words += ["--set", "answers=2"]
    assert distil.main(words) == 0 and "2 prompts, greedy" in (out / "report.md").read_text()
    split = json.loads((out / "config.json").read_text())["plan"]["split"]
    assert f"split {split}: " in capsys.readouterr().out and split in (2, 3)
    assert distil.main([*words, "--resume"]) == 0
    assert json.loads((out / "config.json").read_text())["plan"]["split"] == split
    said = capsys.readouterr().out
    assert "untrained" not in said and "step 1" in said
    llm = skv.LLM(out / "export", max_num_seqs=2)
    params = skv.SamplingParams(temperature=0.0, max_tokens=4)
    assert llm.generate("the cat", params, use_tqdm=False)[0].outputs[0].token_ids


def settings(name: str, machine: Machine):
    config = skv.ModelConfig.from_hf(ARCHITECTURES / f"{name}.json")
    rows = 4 if machine is CPU else 16
    data = DataConfig(sources=("x",), seq_len=512 if machine is CPU else 4096, batch_size=rows)
    return distil.make_experiment(name, config, machine, data, data, PlanConfig(split=16), 100)


def test_settings_follow_from_the_model_and_the_machine():
    """A student is evaluated at 2048 tokens too if its model supports them."""
    large, small = settings("llama8b", SLICE), settings("demo_teacher", CPU)
    assert large.optimizer.learning_rate == 3e-4, "the paper's"
    assert 1e-3 <= small.optimizer.learning_rate <= 2e-3, "the demo takes 2e-3"
    assert (large.dtype, large.remat, small.dtype, small.remat) == ("bfloat16", True, "float32", False)
    assert large.plan.init_tokens == 65_536 > large.plan.init_tokens // 16 >= 4096, "more than unknowns"
    alone = settings("llama8b", SLICE._replace(devices=4))
    assert (large.optimizer.accumulate, alone.optimizer.accumulate) == (1, 4), "a row a device"
    for e, lengths in ((large, (2048, 4096)), (small, (512, 2048))):
        assert e.eval_lengths == lengths == tuple(e.held_out())
        tokens = e.evaluation.batch_size * e.evaluation.seq_len
        assert tokens <= e.data.batch_size * e.data.seq_len, "no more at a time than a step has"
        assert e.evaluation_batches * tokens == (65_536 if e is large else 16_384)


def test_rows_are_as_many_as_devices_share_out_and_chats_count_where_the_assistant_speaks(tmp_path):
    folder = made.teacher(tmp_path / "teacher", CHATML)
    tokenizer = load_tokenizer(folder)
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    texts = made.texts(tmp_path / "texts.jsonl")
    for sources, mask in (([str(tmp_path / "chats.jsonl")], "assistant"), ([texts], "all")):
        for devices in (1, 3, 16):
            data = distil.data_for(sources, made.CONFIG, tokenizer, SLICE._replace(devices=devices), None)
            assert data.batch_size % devices == 0 and data.seq_len == 64 and data.mask == mask
    base = load_tokenizer(made.teacher(tmp_path / "base"))
    data = distil.data_for([str(tmp_path / "chats.jsonl")], made.CONFIG, base, CPU, None)
    assert (data.chats, data.mask) == ("plain", "all"), "it has no chat template"
    assert base.decode(Samples(data, base)[0].tokens.tolist()) == "q\n\na"


@pytest.mark.parametrize(
    "words, name",
    [
        ("--data nowhere.jsonl", "nowhere.jsonl"),
        *((f"--data nowhere.jsonl --split {split}", "--split") for split in ("4", "half")),
        ("--data TEXTS --weight 2 --weight 1", "weight"),
        ("--data TEXTS --columns txt=body", "columns"),
        ("--data TEXTS --columns text=bdoy", "bdoy"),
        ("--data TEXTS more.jsonl", "more.jsonl"),
        *((f"--data TEXTS --length {length}", "--length") for length in (0, 128)),
        ("--data TEXTS --steps 0", "--steps"),
        ("--data TEXTS --set step=3", "steps"),
        ("--dat x --splt 2", "--split"),
        ("", "--data"),
    ],
)
def test_invalid_arguments_are_refused_in_a_line(words, name, teacher, tmp_path, capsys):
    texts, out = made.texts(tmp_path / "rows.jsonl"), tmp_path / "out"
    flags = [texts if word == "TEXTS" else word for word in words.split()]
    assert distil.main([str(teacher), *flags, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and name in error and not out.exists()


def test_a_folder_that_holds_no_run_does_not_go_on(teacher, tmp_path, capsys):
    words = ["--data", made.texts(tmp_path / "rows.jsonl"), "--out", str(teacher), "--resume"]
    config = (teacher / "config.json").read_bytes()
    for more in ([], ["--split", "2"]):
        assert distil.main([str(teacher), *words, *more]) == 2
        assert capsys.readouterr().err.count("\n") == 1 and (teacher / "config.json").read_bytes() == config


def test_a_model_without_embeddings_for_its_tokenizer_is_refused_before_it_is_measured(tmp_path, capsys):
    folder = made.teacher(tmp_path / "small", config=dataclasses.replace(made.CONFIG, vocab_size=200))
    texts = made.texts(tmp_path / "rows.jsonl")
    assert distil.main([str(folder), "--data", texts, "--out", str(tmp_path / "out")]) == 2
    assert plan.main([str(folder), "--text", texts]) == 2
    out, error = capsys.readouterr()
    assert "untrained" not in out and error.count("200") == 2
