"""Folders as others publish them go through all that their family supports, with transformers' results."""

import filecmp
import warnings

import numpy as np
import published_folders
import pytest
import torch
import transformers
from published_folders import FOLDERS, make, theirs

import swiftkv_jax as skv
from swiftkv_jax.common.errors import UsageWarning
from swiftkv_jax.config.plan import KVPlan

CHAT = [{"role": "user", "content": "the cat sat on the mat"}]
TEXT = "the dog sat on the log"
GREEDY = skv.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "page_size": 8, "num_pages": 40, "dtype": "float32"}
STEPS = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "repetition_penalty": 1.0}
SOUND = (np.sin(np.arange(16000) / 9) * 0.3).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def of(name: str):
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp("published"))
        return made[name]

    return of


def family(name: str) -> str:
    return published_folders.raw_config(name)["model_type"]


DECODERS = [name for name in FOLDERS if family(name) not in ("t5", "whisper")]
QUICK = (  # one of each form of tokenizer and of weights; the others are slow
    "google--gemma-3-1b-it", "meta-llama--Llama-3.1-8B-Instruct", "microsoft--Phi-3-mini-4k-instruct",
    "openai-community--gpt2",
)  # fmt: skip


def same_files(one, other) -> None:
    """Everything but weights and config.json is the same."""
    own = [path for path in one.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    for path in own:
        if path.name != "config.json":
            assert filecmp.cmp(path, other / path.relative_to(one), shallow=False), path.name


def same_text(tokenizer, llm: skv.LLM, ids) -> None:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in text:  # of bytes that are no UTF-8 the library replaces the neighbours too
        assert llm.tokenizer.decode(ids) == text


def generated(model, ids: list[int]) -> list[int]:
    asked = {"inputs": torch.tensor([ids]), "attention_mask": torch.ones((1, len(ids)), dtype=torch.int64)}
    with torch.no_grad():
        return model.generate(**asked, eos_token_id=None, **STEPS)[0].tolist()


@pytest.mark.slow(*(name for name in DECODERS if name not in QUICK))
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_answers_as_in_transformers_and_its_student_and_export_load(name, folder, tmp_path):
    path = folder(name)
    tokenizer, model = theirs(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "config.json: auto_map", UsageWarning)
        llm = skv.LLM(path, **SIZES)
        net, params = skv.from_pretrained(path)
    if llm.tokenizer.template:
        (answer,) = llm.chat(CHAT, GREEDY, use_tqdm=False)
        want = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    else:
        (answer,) = llm.generate([TEXT], GREEDY, use_tqdm=False)
        want = tokenizer(TEXT)["input_ids"]
    assert list(answer.prompt_token_ids) == want
    ids = answer.outputs[0].token_ids
    assert want + list(ids) == generated(model, want)
    same_text(tokenizer, llm, ids)
    ends = model.generation_config.eos_token_id
    assert set(llm.eos_ids) >= set(ends if isinstance(ends, list) else [ends])

    skv.save_pretrained(tmp_path / "export", net, params)
    same_files(path, tmp_path / "export")
    again = theirs(tmp_path / "export")[1]
    with torch.no_grad():
        torch.testing.assert_close(again(torch.tensor([want])).logits, model(torch.tensor([want])).logits)

    student, own = skv.to_swiftkv(net, params, KVPlan.swiftkv(net.config.num_layers, 1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has no PyTorch code", UsageWarning)
        skv.save_pretrained(tmp_path / "student", student, own)
    same_files(path, tmp_path / "student")
    served = skv.LLM(tmp_path / "student", **SIZES)
    assert served.eos_ids == llm.eos_ids and served.tokenizer.fingerprint == llm.tokenizer.fingerprint
    if name in QUICK:
        assert len(served.generate([want], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


@pytest.mark.slow("google-t5--t5-small")
@pytest.mark.parametrize("name", [name for name in FOLDERS if family(name) == "t5"])
def test_a_t5_answers_as_in_transformers_and_its_export_loads(name, folder, tmp_path):
    path = folder(name)
    tokenizer, model = theirs(path)
    llm = skv.LLM(path, **SIZES)
    (answer,) = llm.generate([TEXT], GREEDY, use_tqdm=False)
    source = tokenizer(TEXT)["input_ids"]
    ids = list(answer.outputs[0].token_ids)
    assert [0, *ids] == generated(model, source)
    same_text(tokenizer, llm, ids)

    skv.save_pretrained(tmp_path / "export", *skv.from_pretrained(path))
    same_files(path, tmp_path / "export")
    assert generated(theirs(tmp_path / "export")[1], source) == [0, *ids]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FOLDERS if family(name) == "whisper"])
def test_a_whisper_hears_as_in_transformers_and_its_export_loads(name, folder, tmp_path):
    path = folder(name)
    tokenizer, model = theirs(path)
    llm = skv.LLM(path, **{field: size for field, size in SIZES.items() if field != "num_pages"})
    (found,) = llm.transcribe([(SOUND, 16000)], "fr", sampling_params=GREEDY)
    want = heard(model, path)
    output = found.windows[0]
    assert list(output.prompt_token_ids) + list(output.outputs[0].token_ids) == want
    ids = list(output.outputs[0].token_ids)
    same_text(tokenizer, llm, ids)

    skv.save_pretrained(tmp_path / "export", *skv.from_pretrained(path))
    same_files(path, tmp_path / "export")
    assert heard(theirs(tmp_path / "export")[1], path) == want


def heard(model, path) -> list[int]:
    how = transformers.WhisperFeatureExtractor.from_pretrained(path)
    features = how(SOUND, sampling_rate=16000, return_tensors="pt").input_features
    asked = {"language": "fr", "task": "transcribe", "return_dict_in_generate": True}
    model.generation_config.eos_token_id = None
    steps = {name: value for name, value in STEPS.items() if name != "repetition_penalty"}
    return model.generate(features, **asked, **steps)["sequences"][0].tolist()
