"""`swiftkv distil`: without a config file it ends with a student that answers."""

import dataclasses
import json
from pathlib import Path

import made
import pytest
from tokenizers_made import CHATML

import swiftkv_jax as skv
from benchmarks.papers.compare import __main__ as compare
from swiftkv_jax.cli import convert, distil, plan
from swiftkv_jax.cli import train as training
from swiftkv_jax.cli.distil import Machine
from swiftkv_jax.config.rope import RopeConfig
from swiftkv_jax.distill.config import Experiment, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig
from swiftkv_jax.distill.data.samples import Samples
from swiftkv_jax.distill.fields import rows
from swiftkv_jax.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ROOT / "swiftkv_jax" / "configs" / "architectures"
CPU, SLICE = Machine(platform="cpu", devices=1), Machine(platform="tpu", devices=16)
FEWER = ["--set", "plan.init_tokens=400", "--set", "evaluation_batches=1", "--set", "log_every=1"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return made.teacher(tmp_path_factory.mktemp("teacher"), CHATML)


def test_one_distil_command_makes_a_student(teacher, tmp_path, capsys):
    data, out = made.texts(tmp_path / "rows.jsonl"), tmp_path / "run"
    words = [str(teacher), "--data", data, "--out", str(out), "--split", "2", "--share", "2"]
    shape = ["--length", "24", "--set", "optimizer.clip=0.5", "--steps", "2", *FEWER]
    assert distil.main([*words, *shape]) == 0
    said = capsys.readouterr().out
    assert f"swiftkv serve {out}/export --http" in said and "step 2/2" in said
    config = json.loads((out / "config.json").read_text())
    assert (config["plan"]["split"], config["plan"]["share"], config["steps"]) == (2, 2, 2)
    assert (config["data"]["split"], config["evaluation"]["split"]) == ("train", "held_out")
    assert config["optimizer"]["clip"] == 0.5 and config["export_dtype"] == "bfloat16"
    assert "| teacher |" in (out / "report.md").read_text() and (out / "export" / "README.md").exists()
    student, params = skv.from_pretrained(out / "export")
    assert student.plan == skv.KVPlan.swiftkv(4, 2, 2) and params["embed"].dtype == "bfloat16"
    assert distil.main([*words, *shape]) == 2
    assert "already holds a run: give --resume" in capsys.readouterr().err


@pytest.mark.slow
def test_auto_uses_the_reported_split_and_a_resumed_run_keeps_it(teacher, tmp_path, capsys):
    data, out = made.texts(tmp_path / "rows.jsonl"), tmp_path / "run"
    words = [str(teacher), "--data", data, "--out", str(out), "--steps", "1", "--length", "24", *FEWER]
    assert distil.main(words) == 0
    said = capsys.readouterr().out
    split = json.loads((out / "config.json").read_text())["plan"]["split"]
    assert f"split {split}: the earliest" in said and "untrained" in said and split in (2, 3)
    assert distil.main([*words, "--resume"]) == 0
    said = capsys.readouterr().out
    assert "untrained" not in said and "resumed from step 1" in said
    llm = skv.LLM(out / "export", max_num_seqs=2)
    params = skv.SamplingParams(temperature=0.0, max_tokens=4)
    assert llm.generate("the cat", params, use_tqdm=False)[0].outputs[0].token_ids


def settings(name: str, machine: Machine):
    config = skv.ModelConfig.from_hf(ARCHITECTURES / f"{name}.json")
    rows = 4 if machine is CPU else 16
    data = DataConfig(sources=("x",), seq_len=512 if machine is CPU else 4096, batch_size=rows)
    return distil.make_experiment(name, config, machine, data, data, PlanConfig(split=16), 100)


def test_settings_follow_from_the_model_and_the_machine():
    large, small = settings("llama8b", SLICE), settings("demo_teacher", CPU)
    assert large.optimizer.learning_rate == 3e-4, "the paper's"
    assert 1e-3 <= small.optimizer.learning_rate <= 2e-3, "the demo takes 2e-3"
    assert (large.dtype, large.remat, small.dtype, small.remat) == ("bfloat16", True, "float32", False)
    assert large.plan.init_tokens == 65_536 > large.plan.init_tokens // 16 >= 4096, "more than unknowns"
    alone = settings("llama8b", dataclasses.replace(SLICE, devices=4))
    assert (large.optimizer.accumulate, alone.optimizer.accumulate) == (1, 4), "a row a device"


def test_a_student_is_evaluated_at_2048_tokens_too_if_its_model_supports_them():
    large, small = settings("llama8b", SLICE), settings("demo_teacher", CPU)
    for e, lengths in ((large, (2048, 4096)), (small, (512, 2048))):
        assert e.eval_lengths == lengths == tuple(e.held_out())
        assert e.evaluation is not None and e.evaluation.seq_len == lengths[-1]
        tokens = e.evaluation.batch_size * e.evaluation.seq_len
        assert tokens <= e.data.batch_size * e.data.seq_len, "no more at a time than a step has"
        assert e.evaluation_batches * tokens == (65_536 if e is large else 16_384)
    assert large.evaluation is not None and large.evaluation.batch_size % SLICE.devices == 0
    assert distil.evaluated_lengths(512, 1024) == (512,) and distil.evaluated_lengths(2048, 4096) == (2048,)


def test_rows_are_as_many_as_devices_share_out_and_chats_count_where_the_assistant_speaks(tmp_path):
    folder = made.teacher(tmp_path / "teacher", CHATML)
    tokenizer = load_tokenizer(folder)
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    texts = made.texts(tmp_path / "texts.jsonl")
    for sources, mask in (([str(tmp_path / "chats.jsonl")], "assistant"), ([texts], "all")):
        for devices in (1, 3, 16):
            data = distil.data_for(
                sources, made.CONFIG, tokenizer, dataclasses.replace(SLICE, devices=devices), None
            )
            assert data.batch_size % devices == 0 and data.seq_len == 64 and data.mask == mask
    base = load_tokenizer(made.teacher(tmp_path / "base"))
    data = distil.data_for([str(tmp_path / "chats.jsonl")], made.CONFIG, base, CPU, None)
    assert (data.chats, data.mask) == ("plain", "all"), "it has no chat template"
    assert base.decode(Samples(data, base)[0].tokens.tolist()) == "q\n\na"


@pytest.mark.parametrize("command", [distil.main, training.main], ids=["distil", "train"])
def test_help_shows_every_field_of_a_config_with_its_meaning_and_default(command, capsys):
    with pytest.raises(SystemExit):
        command(["--help"])
    told = capsys.readouterr().out
    assert all(len(line) <= 100 for line in told.splitlines())
    flags, _, listed = told.partition("fields of the config")
    words = " ".join(listed.split())
    for name, _, default, meaning in rows():
        shown = " ".join(meaning.split()).rstrip(".")
        assert len(shown) > 5 and f" {name} {shown} [{default}]" in words
    assert "--set" in flags and "--resume" in flags
    parts = {name.partition(".")[0] for name, *_ in rows()}
    assert parts == {field.name for field in dataclasses.fields(Experiment)}


@pytest.mark.parametrize(
    "words, said",
    [
        (["--data", "nowhere.jsonl"], "source nowhere.jsonl does not exist"),
        (["--data", "nowhere.jsonl", "--split", "4"], "--split must be in [1, 3], not 4"),
        (["--data", "nowhere.jsonl", "--split", "half"], "--split is auto or a number of layers, not 'half'"),
        (["--data", "TEXTS", "--weight", "2", "--weight", "1"], "are not one for each of 1 sources"),
        (["--data", "TEXTS", "--columns", "txt=body"], "columns are written ours=theirs"),
        (["--data", "TEXTS", "--columns", "text=bdoy"], "no row has the column 'bdoy'"),
        (
            ["--data", "TEXTS", "more.jsonl"],
            "unrecognized arguments: more.jsonl: put quotes around a pattern",
        ),
        (["--data", "TEXTS", "--length", "0"], "--length must be in [2, 64], not 0"),
        (["--data", "TEXTS", "--length", "128"], "--length must be in [2, 64], not 128"),
        (["--data", "TEXTS", "--steps", "0"], "--steps must be at least 1, not 0"),
        (["--data", "TEXTS", "--set", "step=3"], "has no 'step'; did you mean 'steps'?"),
        (["--dat", "x", "--splt", "2"], "did you mean '--split'?"),
        ([], "the following arguments are required: --data"),
    ],
)
def test_invalid_arguments_are_refused_in_a_line(words, said, teacher, tmp_path, capsys):
    texts = made.texts(tmp_path / "rows.jsonl")
    words = [texts if word == "TEXTS" else word for word in words]
    assert distil.main([str(teacher), *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "rope, longest",
    [
        (RopeConfig(rope_type="linear", factor=4.0), 256),
        (RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), 256),
        (RopeConfig(rope_type="llama3", factor=4.0, original_max_position_embeddings=16), 64),
    ],
    ids=lambda given: getattr(given, "rope_type", None),
)
def test_every_command_takes_rows_as_long_as_rotary_scaling_reaches(rope, longest, tmp_path, capsys):
    """In llama3's files max_position_embeddings is the length after scaling."""
    folder = str(made.teacher(tmp_path / "teacher", config=dataclasses.replace(made.CONFIG, rope=rope)))
    out, nowhere = ["--out", str(tmp_path / "out")], "nowhere.jsonl"
    for command, words in (
        (distil.main, [folder, "--data", nowhere, *out, "--length"]),
        (convert.main, [folder, "--split", "2", "--text", nowhere, *out, "--length"]),
        (compare.main, ["--model", folder, "--text", nowhere, *out, "--length"]),
        (convert.main, [folder, "--keep", "0,2", "--text", nowhere, *out, "--length"]),
        (plan.main, [folder, "--context"]),
    ):
        assert command([*words, str(longest)]) == (0 if command is plan.main else 2)
        error = capsys.readouterr().err
        assert command is plan.main or f"source {nowhere} does not exist" in error, error
        assert command([*words, str(longest + 1)]) == 2
        assert f"{longest}], not {longest + 1}" in capsys.readouterr().err
    fewer = ["--split", "2", "--init", "fold", "--text", made.texts(tmp_path / "rows.jsonl"), *out]
    assert convert.main([folder, *fewer, "--length", str(longest)]) == 0
    assert f"in rows of {longest}:" in capsys.readouterr().out


def test_a_folder_that_holds_no_run_does_not_go_on(teacher, tmp_path, capsys):
    words = ["--data", made.texts(tmp_path / "rows.jsonl"), "--out", str(teacher), "--resume"]
    config = (teacher / "config.json").read_bytes()
    for more, said in ([], "is not that of a run"), (["--split", "2"], "belongs to another run"):
        assert distil.main([str(teacher), *words, *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error and (teacher / "config.json").read_bytes() == config


@pytest.mark.slow
def test_settings_of_the_data_hold_for_how_it_is_read(teacher, tmp_path, capsys):
    """What the message about a broken line tells to do works, with spaces in the path of the run too."""
    texts, out = made.texts(tmp_path / "rows.jsonl"), tmp_path / "a run"
    Path(texts).write_text(Path(texts).read_text().replace('"text"', '"body"') + "{\n")
    words = [str(teacher), "--data", texts, "--out", str(out), "--split", "2", "--steps", "1"]
    words += ["--set", 'data.columns=("text=body",)', "--set", "data.seq_len=16", *FEWER]
    assert distil.main(words) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "--set data.skip_bad_lines=True" in told
    assert distil.main([*words, "--set", "data.skip_bad_lines=True"]) == 0
    assert f"serve it: swiftkv serve '{out}/export' --http" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    for data in (config["data"], config["evaluation"]):
        assert (data["seq_len"], data["skip_bad_lines"]) == (16, True)


def test_of_few_chats_one_that_the_template_refuses_is_named_by_its_own_file_and_line(tmp_path, capsys):
    """Few are read through files of pieces, some of which are held out."""
    folder = made.teacher(
        tmp_path / "teacher", "{% if messages[0].content == 'q6' %}{{ no.way }}{% endif %}" + CHATML
    )
    chats = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}] for i in range(20)]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    out = ["--split", "2", "--length", "24", "--out", str(tmp_path / "out")]
    for command, flag in ((distil.main, "--data"), (convert.main, "--text")):
        assert command([str(folder), flag, str(data), *out]) == 2
        assert capsys.readouterr().err.startswith(f"error: {data}:7: ")


def test_a_model_without_embeddings_for_its_tokenizer_is_refused_before_it_is_measured(tmp_path, capsys):
    folder = made.teacher(tmp_path / "small", config=dataclasses.replace(made.CONFIG, vocab_size=200))
    texts = made.texts(tmp_path / "rows.jsonl")
    assert distil.main([str(folder), "--data", texts, "--out", str(tmp_path / "out")]) == 2
    assert plan.main([str(folder), "--text", texts]) == 2
    out, error = capsys.readouterr()
    assert "untrained" not in out and error.count("the model only 200: take the same model's tokenizer") == 2
