"""Sound over HTTP by the `openai` client, unmodified: the same text as `LLM.transcribe`."""

import random

import encoder_models
import http_server
import httpx
import numpy as np
import openai
import pytest
import tiny_engine as tiny
import transformers

import swiftkv_jax as skv
from swiftkv_jax import audio
from swiftkv_jax.checkpoint.generation import read_generation_config
from swiftkv_jax.engine import speech
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
    want = llm.transcribe(sound, "de").text
    asked = {"model": http_server.NAME, "file": ("a.wav", sound), "language": "German"}
    assert want and client.audio.transcriptions.create(**asked).text == want
    assert client.audio.transcriptions.create(**asked, response_format="text") == f"{want}\n"


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # OpenAI's client calls it so
def test_a_translation_is_transcribes_with_that_task(client, llm):
    sound = wav(1.5, 6)
    answer = client.audio.translations.create(model=http_server.NAME, file=("a.wav", sound))
    assert answer.text == llm.transcribe(sound, task="translate").text
    assert answer.text != llm.transcribe(sound).text


@pytest.mark.parametrize("count", [18, 60])
def test_whispers_prompt_is_cut_to_half_a_context_less_one_token(count, client, llm):
    """The last 40 / 2 - 1 = 19 tokens of the text after a space."""
    sound, said = wav(0.8, 7), "".join(np.random.default_rng(3).choice([*"ABCDEFG"], count))
    (frames,) = speech.listen(llm, sound).windows

    def after(most: int) -> str:
        previous = list(f" {said}".encode())[-most:]
        ((_, found),) = llm.run([speech.window_request(llm, frames, "en", previous=previous)])
        return found.outputs[0].text

    given = {"model": http_server.NAME, "file": ("a.wav", sound), "language": "en"}
    answer = client.audio.transcriptions.create(**given, prompt=f"\n{said} ").text
    assert answer == after(19) != after(18)
    assert (answer == after(20)) == (count == 18)


FILE = {"file": ("a.wav", wav(0.5))}


@pytest.mark.parametrize(
    "fields, files, param",
    [
        ({}, {"other": b""}, "file"),
        ({}, {"file": ("a.wav", b"")}, "file"),
        ({}, {"file": ("a.wav", b"ID3 no wave")}, "file"),
        ({}, {"file": ("a.wav", wav(0.0))}, "file"),
        ({}, {"file": ("a.wav", encoder_models.wav_with_nan())}, "file"),
        ({}, {"file": ("a.wav", wav(130.0))}, "file"),  # of 128 windows at most
        ({}, [*FILE.items()] * 2, "file"),
        ({}, {**FILE, "a": b"", "b": b""}, None),
        ({"language": "Klingon"}, FILE, "language"),
        ({"temperature": "hot"}, FILE, "temperature"),
        ({"temperature": "3"}, FILE, "temperature"),
        ({"response_format": "srt"}, FILE, "response_format"),
        ({"stream": "true"}, FILE, "stream"),
        ({"timestamp_granularities[]": "word"}, FILE, "timestamp_granularities[]"),
        ({"prompt": "x" * 20000}, FILE, "prompt"),
        ({"model": "text"}, FILE, "file"),  # which hears nothing
    ],
)
def test_unsupported_transcription_requests_are_refused_by_field(served, fields, files, param):
    answer = served.http.post("/v1/audio/transcriptions", data=fields, files=files)
    assert answer.status_code == 400 and http_server.error_of(answer)["param"] == param, answer.text


def test_too_many_windows_are_refused_before_sound_is_resampled(served, monkeypatch):
    """Sound of a low rate is long for its bytes. So are other bodies, and a text for Whisper."""

    def taken(*_):
        raise AssertionError("memory was taken first")

    for name in ("resampled", "features"):
        monkeypatch.setattr(audio, name, taken)
    kind = "multipart/form-data"
    for status, given in (
        (400, {"files": {"file": ("a.wav", wav(128.1, 1, 1000))}}),
        (400, {"content": b"--x\r\nno form", "headers": {"content-type": f"{kind}; boundary=x"}}),
        (400, {"content": b"", "headers": {"content-type": kind}}),
        (404, {"data": {"model": "none"}, "files": FILE}),
        (415, {"json": {}}),
    ):
        answer = served.http.post("/v1/audio/transcriptions", **given)
        assert answer.status_code == status and http_server.error_of(answer), answer.text
    assert served.http.post("/v1/completions", json={"prompt": "A"}).status_code == 400


@pytest.mark.parametrize("origin, status", [("http://evil.example", 403), ("null", 403), (None, 200)])
def test_a_page_of_another_site_cannot_send_sound(served, origin, status):
    """A browser sends a form without asking first; JSON it asks for, and is refused."""
    headers = {"origin": origin or served.url}
    answer = served.http.post(
        "/v1/audio/transcriptions", data={"language": "en"}, files=FILE, headers=headers, timeout=60
    )
    assert answer.status_code == status, answer.text


def test_sound_may_be_larger_than_other_bodies(folder):
    llm = make_whisper(folder)
    with http_server.Running(llm, warm_up=False, max_body_bytes=1000, max_audio_bytes=40_000) as server:
        heard = {"data": {"language": "en"}, "timeout": 60}
        fits = server.http.post("/v1/audio/transcriptions", files=FILE, **heard)
        assert fits.status_code == 200, fits.text
        large = {"file": ("a.wav", wav(2.0))}
        assert server.http.post("/v1/audio/transcriptions", files=large, **heard).status_code == 413
        assert server.http.post("/v1/completions", json={"prompt": "x" * 2000}).status_code == 413


def test_a_disconnected_client_releases_everything(served):
    scheduler = served.api.llm.engine.scheduler
    for _ in range(3):
        with pytest.raises(httpx.TimeoutException):
            given = {"data": {"language": "en"}, "files": {"file": ("a.wav", wav(60.0))}}
            served.http.post("/v1/audio/transcriptions", **given, timeout=0.3)
    http_server.wait_for(served.idle)
    assert scheduler.sources.available == scheduler.sources.total


def heard(server: http_server.Running, sound: bytes, key: str | None = None) -> httpx.Response:
    given = {"headers": {"authorization": f"Bearer {key}"}} if key else {}
    files = {"file": ("a.wav", sound)}
    return server.http.post("/v1/audio/transcriptions", data={"language": "en"}, files=files, **given)


def all_free(server: http_server.Running) -> bool:
    """Pages of both spaces."""
    sources = server.engine.scheduler.sources
    return server.idle() and sources.available == sources.total


VALUES = {
    "model": (http_server.NAME, "", "no such"),
    "language": ("en", "German", "<|fr|>", "Klingon", "", "EN\0", "é" * 40),
    "temperature": ("0", "0.5", " 1 ", "-0", "1.01", "nan", "1e400", "", "hot", "٣"),
    "response_format": ("json", "text", "", "JSON", "srt"),
    "prompt": ("A, B", " ", "", "é", "\0", "\r\n--x\r\n", "a" * 16_385),
    "file": ("no file", ""),
}


def random_form(source: random.Random) -> bytes:
    """Up to two files and two fields between lines of --x; of one form in eight some bytes are others."""
    good = wav(source.choice((0.1, 0.3, 1.2)), source.randrange(9), source.choice((8000, 16_000)))
    broken = b"", good[: source.randrange(len(good))], source.randbytes(300), good[:20] + source.randbytes(99)
    files = [source.choice((good,) * 6 + broken) for _ in range(source.choice((0, 2) + (1,) * 8))]
    parts = [(f'file"; filename="{number}.wav', sound) for number, sound in enumerate(files)]
    for name in source.choices([*VALUES], k=source.randint(0, 2)):
        value = source.choice(VALUES[name]).encode()
        parts.append((name, source.choice((value,) * 5 + (source.randbytes(9),))))
    source.shuffle(parts)
    head = '--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\n'
    raw = b"".join(head.format(name).encode() + value + b"\r\n" for name, value in parts) + b"--x--\r\n"
    if source.random() < 1 / 8:
        at = source.randrange(min(len(raw), 200))
        raw = raw[:at] + source.randbytes(3) + raw[at + source.randrange(50) :]
    return raw


@pytest.mark.filterwarnings("ignore:Unclosed file:ResourceWarning")  # Starlette's, where a file does not end
@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_random_forms_are_answered_or_refused_and_harm_nobody(count, served):
    """And those that were refused change no text after them."""
    source, seen, good = random.Random(1), set(), wav(0.5)
    want = heard(served, good).json()
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for _ in range(count):
        raw = random_form(source)
        answer = served.http.post("/v1/audio/transcriptions", content=raw, headers=headers)
        seen.add(answer.status_code)
        if answer.status_code != 200:
            error = http_server.error_of(answer)
            assert answer.status_code < 500 and error["type"] == "invalid_request_error", (raw[:300], error)
    assert seen >= {200, 400, 404} and want["text"]
    assert heard(served, good).json() == want
    http_server.wait_for(lambda: all_free(served))
