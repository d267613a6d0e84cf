"""Models by hub id: trained, exported with all that belongs to them, served; and at a revision."""

import dataclasses
import json
from pathlib import Path

import pytest
from hub_made import Hub
from tiny_models import WORDS, tiny
from tokenizers_made import CHATML, make_tokenizer

import swiftkv_jax as skv
from swiftkv_jax.checkpoint.write import GENERATION_FILES, TOKENIZER_FILES
from swiftkv_jax.cli.train import main as train
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.text.tokenizer import load_tokenizer

CONFIG = dataclasses.replace(WORDS, num_layers=2, windows=())
EXPERIMENT = """
from swiftkv_jax.distill.config import Experiment, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig

data = DataConfig(sources=({data!r},), seq_len=16, batch_size=2)
config = Experiment(
    name="hub", model="acme/tiny", plan=PlanConfig(split=1), data=data, steps=2, dtype="float32", remat=False
)
"""
EOS = [3, 1]
GREEDY = skv.SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Hub:
    return Hub(tmp_path / "hub", monkeypatch)


def make_model(folder: Path, seed: int = 0) -> Path:
    """A model with a tokenizer, a chat template, and generation settings of its own."""
    make_tokenizer(folder, CHATML)
    skv.save_pretrained(folder, *tiny(CONFIG, KVPlan.standard(2), seed))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "top_k": 7}))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"eos_token_id": EOS[0], "bos_token_id": 2}))
    return folder


@pytest.fixture
def experiment(tmp_path) -> list[str]:
    """The arguments of a run of two steps that names its teacher by hub id."""
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"text": "the cat sat on the mat", "id": str(i)}) + "\n" for i in range(9))
    )
    (tmp_path / "hub.py").write_text(EXPERIMENT.format(data=str(data)))
    return ["--config", str(tmp_path / "hub.py"), "--out", str(tmp_path / "run")]


@pytest.mark.slow
def test_a_teacher_by_hub_id_exports_a_student_that_answers_text(hub, experiment, tmp_path):
    commit = hub.publish("acme/tiny", make_model(tmp_path / "tiny"))
    assert train(experiment) == 0
    export = tmp_path / "run" / "export"
    kept = ["tokenizer.json", "chat_template.jinja", "generation_config.json"]
    for name in kept:
        assert (export / name).read_bytes() == (tmp_path / "tiny" / name).read_bytes()
    assert not any(path.is_symlink() for path in export.iterdir()), f"links into the cache, at {commit}"

    llm = skv.LLM(export, max_num_seqs=2)
    assert llm.eos_ids == tuple(sorted(EOS)) and llm.defaults.top_k == 7
    ids = load_tokenizer(tmp_path / "tiny").encode("the cat")
    text, tokens = llm.generate(["the cat", ids], GREEDY, use_tqdm=False)
    assert text.prompt_token_ids == ids and text.outputs[0].text == tokens.outputs[0].text != ""
    assert llm.request({"messages": [{"role": "user", "content": "the cat"}]}).token_ids


@pytest.mark.slow
def test_a_tokenizer_given_apart_gives_its_files_and_nothing_else(hub, experiment, tmp_path):
    """End tokens and sampling defaults belong to the model; the other folder's are left where they are."""
    hub.publish("acme/tiny", make_model(tmp_path / "tiny"))
    other = make_tokenizer(tmp_path / "other", template=None, bos=False)
    (other / "generation_config.json").write_text('{"eos_token_id": 99, "temperature": 0.25}')
    (other / "config.json").write_text('{"model_type": "llama", "eos_token_id": 98, "bos_token_id": 97}')
    hub.publish("acme/words", other)
    assert train([*experiment, "--set", "tokenizer=acme/words"]) == 0
    export = tmp_path / "run" / "export"
    assert (export / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
    assert not (export / "chat_template.jinja").exists(), "of the model's own tokenizer"
    assert json.loads((export / "generation_config.json").read_text()) == {"eos_token_id": EOS, "top_k": 7}
    raw = json.loads((export / "config.json").read_text())
    assert (raw["eos_token_id"], raw["bos_token_id"]) == (EOS[0], 2)


def test_a_revision_chooses_among_the_commits_of_a_hub_model(hub, tmp_path):
    for seed, branch in enumerate(("main", "v2")):
        commit = hub.publish("acme/tiny", make_model(tmp_path / branch, seed), branch)
    here = {name: skv.from_pretrained(tmp_path / name)[1]["norm"] for name in ("main", "v2")}
    assert (here["main"] != here["v2"]).any()
    for revision, name in ((None, "main"), ("v2", "v2"), (commit, "v2")):
        model, params = skv.from_pretrained("acme/tiny", revision=revision)
        assert (params["norm"] == here[name]).all()
        llm = skv.LLM("acme/tiny", revision=revision, max_num_seqs=2)
        assert (llm.params["norm"] == here[name]).all() and llm.tokenizer.name == model.config.source
    with pytest.raises(skv.UsageError):
        skv.from_pretrained("acme/tiny", revision="v3")
    with pytest.raises(skv.UsageError):
        skv.LLM(tmp_path / "main", revision="v2")


def test_an_export_has_every_file_that_was_loaded(hub, tmp_path):
    """From the hub's cache, where files are links, and onto an older export."""
    teacher = make_model(tmp_path / "teacher")
    names = [pattern.replace("*", "tool_use") for pattern in (*TOKENIZER_FILES, *GENERATION_FILES)]
    for name in names:
        (teacher / name).parent.mkdir(exist_ok=True)
        if not (teacher / name).exists():
            (teacher / name).write_text("{}")
    hub.publish("acme/all", teacher)
    out = tmp_path / "out"
    for _ in range(2):
        skv.save_pretrained(out, *skv.from_pretrained("acme/all"))
        assert {name: (out / name).read_bytes() for name in names} == {
            name: (teacher / name).read_bytes() for name in names
        }
        assert load_tokenizer(out).templates == load_tokenizer("acme/all").templates
        assert load_tokenizer(out).templates.keys() == {"default", "tool_use"}


def test_a_saved_model_keeps_the_tokenizer_of_the_loaded_one(tmp_path, monkeypatch):
    """The steps are those of README's example: load, rewire, save, serve."""
    teacher = make_model(tmp_path / "teacher")
    monkeypatch.chdir(tmp_path)
    model, params = skv.from_pretrained("teacher")
    monkeypatch.chdir(tmp_path.parent)
    student, student_params = skv.to_swiftkv(model, params, KVPlan.swiftkv(2, 1))
    skv.save_pretrained(tmp_path / "student", student, student_params)
    llm = skv.LLM(tmp_path / "student", max_num_seqs=2)
    assert llm.tokenizer.fingerprint == load_tokenizer(teacher).fingerprint
    assert llm.eos_ids == tuple(sorted(EOS))
    assert llm.generate("the cat", GREEDY, use_tqdm=False)[0].outputs[0].text


def test_a_link_to_outside_the_models_folder_is_not_copied(tmp_path):
    model, params = skv.from_pretrained(make_model(tmp_path / "teacher"))
    (tmp_path / "secret").write_text("private")
    (tmp_path / "teacher" / "merges.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(skv.UsageError, match=r"merges\.txt is a link that leaves its folder"):
        skv.save_pretrained(tmp_path / "out", model, params)
    assert not (tmp_path / "out").exists()
