"""Folders as Gemma 1, Flan-T5, OLMo and Whisper publish them, over HTTP: answers are transformers'."""

import json

import encoder_models
import http_server
import openai
import pytest
import torch
from published_folders import make, theirs

import swiftkv_jax as skv
from swiftkv_jax.engine import speech

pytestmark = pytest.mark.slow  # tests/test_published_folders.py compares logits
COUNT = 8
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "page_size": 8, "dtype": "float32"}
STEPS = {"do_sample": False, "max_new_tokens": COUNT, "min_new_tokens": COUNT, "eos_token_id": None}
CHAT = [{"role": "user", "content": "the cat sat on the mat"}]
TEXT = "the dog sat on the log"


def words(tokenizer, size: int) -> list[int]:
    """Tokens of plain letters: random models write any, and parts of characters are no text."""
    found = [i for i in range(min(size, len(tokenizer))) if tokenizer.decode([i]).strip().isalpha()]
    return [i for i in found if tokenizer.decode([i]).isascii()][:64]


@pytest.mark.parametrize("name", ["google--gemma-2b-it", "allenai--OLMo-1B-hf", "google--flan-t5-small"])
def test_a_chat_or_a_completion_is_transformers(name, tmp_path):
    folder = make(name, tmp_path / "folder")
    tokenizer, model = theirs(folder)
    allowed = words(tokenizer, model.config.vocab_size)
    asked = {"model": http_server.NAME, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    asked["allowed_token_ids"] = allowed
    with http_server.Running(skv.LLM(folder, **SIZES), warm_up=False) as server:
        if tokenizer.chat_template:
            answer = server.http.post("/v1/chat/completions", json=asked | {"messages": CHAT}).json()
            got = answer["choices"][0]["message"]["content"]
            ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
        else:
            answer = server.http.post("/v1/completions", json=asked | {"prompt": TEXT}).json()
            got, ids = answer["choices"][0]["text"], tokenizer(TEXT)["input_ids"]
    mask = torch.ones((1, len(ids)), dtype=torch.int64)
    given = {"inputs": torch.tensor([ids]), "attention_mask": mask}
    with torch.no_grad():
        out = model.generate(**given, **STEPS, prefix_allowed_tokens_fn=lambda *_: allowed)[0].tolist()
    begun = 1 if model.config.is_encoder_decoder else len(ids)
    before = tokenizer.decode(out[:begun], skip_special_tokens=True)
    assert got == tokenizer.decode(out, skip_special_tokens=True)[len(before) :] and got.strip()
    assert answer["usage"]["completion_tokens"] == COUNT


def test_a_transcription_is_transformers(tmp_path):
    folder = make("openai--whisper-small", tmp_path / "folder")
    tokenizer, model = theirs(folder)
    file, size = folder / "generation_config.json", model.config.vocab_size
    raw = json.loads(file.read_text())
    kept = {*words(tokenizer, size), tokenizer.eos_token_id}
    file.write_text(json.dumps(raw | {"suppress_tokens": [i for i in range(size) if i not in kept]}))
    model = theirs(folder)[1]
    sound, llm = encoder_models.wav(0.9, 3), skv.LLM(folder, **SIZES)
    with (
        http_server.Running(llm, warm_up=False) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        asked = {"model": http_server.NAME, "file": ("a.wav", sound), "language": "French"}
        got = client.audio.transcriptions.create(**asked).text
    (frames,) = speech.listen(llm, sound).windows
    out = model.generate(torch.tensor(frames).T[None], language="fr", task="transcribe", do_sample=False)[0]
    assert got == tokenizer.decode(out, skip_special_tokens=True).strip() and len(got) > 5
