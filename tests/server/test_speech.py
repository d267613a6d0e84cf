"""Sound over HTTP by the `openai` client, unmodified: the same text as `LLM.transcribe`."""

import encoder_models
import http_server
import httpx
import openai
import pytest
import tiny_engine as tiny
import transformers

import swiftkv_jax as skv
from swiftkv_jax.checkpoint.generation import read_generation_config
from swiftkv_jax.engine.llm import LLM

wav = encoder_models.wav

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "steps_per_launch": 4, "page_size": 8}


def make_whisper(folder) -> LLM:
    """Windows of 1 s, three languages."""
    encoder_models.save("whisper", folder)
    transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1).save_pretrained(folder)
    model, params = skv.from_pretrained(folder, cuts=None)
    generation = read_generation_config(folder)
    return LLM.from_model(model, params, tiny.Bytes(), generation=generation, **SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def running(folder):
    llm = make_whisper(folder)
    with http_server.Running(llm, {"text": http_server.make_llm()}, warm_up=False) as server:
        yield server


@pytest.fixture(scope="module")
def llm(running, folder):
    return make_whisper(folder)


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client
    http_server.wait_for(running.idle)


@pytest.mark.parametrize(
    "sound", [wav(0.7), wav(2.4, 1), wav(1.2, 2, 8000, 2)], ids=["short", "three windows", "stereo of 8 kHz"]
)
def test_a_transcription_is_transcribes(client, llm, sound):
    want = llm.transcribe(sound, "de")
    answer = client.audio.transcriptions.create(
        model=http_server.NAME, file=("a.wav", sound), language="German"
    )
    assert want.text and answer.text == want.text


def test_without_a_language_the_model_hears_which_it_is(client, llm):
    sound = wav(1.5, 5)
    want = llm.transcribe(sound)
    answer = client.audio.transcriptions.create(model=http_server.NAME, file=("a.wav", sound))
    assert answer.text == want.text == llm.transcribe(sound, want.language).text


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # OpenAI's client calls it so
def test_a_translation_is_transcribes_with_that_task(client, llm):
    sound = wav(1.5, 6)
    answer = client.audio.translations.create(model=http_server.NAME, file=("a.wav", sound))
    assert answer.text == llm.transcribe(sound, task="translate").text
    assert answer.text != llm.transcribe(sound).text


def test_text_that_came_before_and_the_temperature_change_the_answer(client):
    given = {"model": http_server.NAME, "file": ("a.wav", wav(0.8, 7)), "language": "en"}
    plain = client.audio.transcriptions.create(**given).text
    assert client.audio.transcriptions.create(**given).text == plain
    assert client.audio.transcriptions.create(**given, prompt="A, B, C").text != plain
    warm = {client.audio.transcriptions.create(**given, temperature=1.0).text for _ in range(4)}
    assert len(warm) > 1


def test_as_plain_text(client, llm):
    sound = wav(0.8, 8)
    answer = client.audio.transcriptions.create(
        model=http_server.NAME, file=("a.wav", sound), language="en", response_format="text"
    )
    assert answer == f"{llm.transcribe(sound, 'en').text}\n"


FILE = {"file": ("a.wav", wav(0.5))}


@pytest.mark.parametrize(
    "fields, files, param, words",
    [
        ({}, {}, "file", "must have one file"),
        ({}, {"file": ("a.wav", b"")}, "file", "not a wav file"),
        ({}, {"file": ("a.wav", b"ID3 no wave")}, "file", "not a wav file"),
        ({}, {"file": ("a.wav", wav(0.0))}, "file", "0 s of sound"),
        ({}, {"file": ("a.wav", wav(130.0))}, "file", "130 windows; at most 128"),
        ({"language": "Klingon"}, FILE, "language", "is unknown; this model knows de, en, fr"),
        ({"temperature": "hot"}, FILE, "temperature", "valid number"),
        ({"temperature": "3"}, FILE, "temperature", "less than or equal to 1"),
        ({"response_format": "srt"}, FILE, "response_format", "'json' or 'text'"),
        ({"stream": "true"}, FILE, "stream", "the text comes whole"),
        ({"timestamp_granularities[]": "word"}, FILE, "timestamp_granularities[]", "not offered"),
        ({"prompt": "x" * 20000}, FILE, "prompt", "at most 16384 characters"),
        ({"model": "text"}, FILE, "file", "reads text, not sound"),
    ],
)
def test_what_cannot_be_heard_is_refused_by_name(served, fields, files, param, words):
    answer = served.http.post("/v1/audio/transcriptions", data=fields, files=files or {"other": b""})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"], error


def test_other_bodies_are_refused(served):
    post = served.http.post
    assert post("/v1/audio/transcriptions", json={}).status_code == 415
    broken = {"content-type": "multipart/form-data; boundary=x"}
    assert post("/v1/audio/transcriptions", content=b"--x\r\nno form", headers=broken).status_code == 400
    no_boundary = {"content-type": "multipart/form-data"}
    assert post("/v1/audio/transcriptions", content=b"", headers=no_boundary).status_code == 400
    assert post("/v1/audio/transcriptions", data={"model": "none"}, files=FILE).status_code == 404


@pytest.mark.parametrize("origin, status", [("http://evil.example", 403), ("null", 403), (None, 200)])
def test_a_page_of_another_site_cannot_send_sound(served, origin, status):
    """A browser sends a form without asking first; JSON it asks for, and is refused."""
    headers = {"origin": origin or served.url}
    answer = served.http.post(
        "/v1/audio/transcriptions", data={"language": "en"}, files=FILE, headers=headers, timeout=60
    )
    assert answer.status_code == status, answer.text


def test_a_text_is_no_prompt_of_a_whisper(served):
    answer = served.http.post("/v1/completions", json={"prompt": "A"})
    assert answer.status_code == 400 and "transcri" in answer.json()["error"]["message"]


def test_sound_may_be_larger_than_other_bodies(folder):
    llm = make_whisper(folder)
    with http_server.Running(llm, warm_up=False, max_body_bytes=1000, max_audio_bytes=40_000) as server:
        heard = {"data": {"language": "en"}, "timeout": 60}
        fits = server.http.post("/v1/audio/transcriptions", files=FILE, **heard)
        assert fits.status_code == 200, fits.text
        large = {"file": ("a.wav", wav(2.0))}
        assert server.http.post("/v1/audio/transcriptions", files=large, **heard).status_code == 413
        assert server.http.post("/v1/completions", json={"prompt": "x" * 2000}).status_code == 413


def test_who_leaves_gives_everything_back(served):
    scheduler = served.api.llm.engine.scheduler
    for _ in range(3):
        with pytest.raises(httpx.TimeoutException):
            given = {"data": {"language": "en"}, "files": {"file": ("a.wav", wav(60.0))}}
            served.http.post("/v1/audio/transcriptions", **given, timeout=0.3)
    http_server.wait_for(served.idle)
    assert scheduler.sources.available == scheduler.sources.total
