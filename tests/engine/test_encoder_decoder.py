"""T5 and Whisper served: greedy tokens are those that transformers generates, whatever runs beside."""

import dataclasses
import json
import shutil

import encoder_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine as tiny
import tokenizers
import torch
import transformers

import swiftkv_jax as skv
from swiftkv_jax import audio
from swiftkv_jax.checkpoint.generation import read_generation_config
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.engine import speech
from swiftkv_jax.engine.llm import LLM

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "steps_per_launch": 4, "page_size": 8}
T5 = SIZES | {"max_model_len": 40, "max_source_len": 40}
GREEDY = skv.SamplingParams(temperature=0.0, max_tokens=9, min_tokens=9)
COUNT, LANES = 100, 16
RATE = 16_000


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name: str):
        if name not in made:
            made[name] = encoder_models.save(name, tmp_path_factory.mktemp(name))
            if name == "whisper":
                how = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1)
                how.save_pretrained(made[name])
        return made[name]

    return folder


def served(folder, forms=("kv", "kv"), **settings) -> LLM:
    """An engine on a folder, its rows in these forms (of tokens, of sources)."""
    model, params = skv.from_pretrained(folder, cuts=None)
    if forms != ("kv", "kv"):
        model, params = skv.to_slim(model, params, forms[0], cross_forms=forms[1])
    generation = read_generation_config(folder)
    sizes = SIZES if model.config.encoder.mels else T5
    return LLM.from_model(model, params, tiny.Bytes(), generation=generation, **(sizes | settings))


def texts(count: int = 6, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(2, 101, length).tolist() for length in random.integers(1, 41, count)]


def generated(
    folder, sources: list[list[int]], count: int = 9, begun: tuple[int, ...] = ()
) -> list[list[int]]:
    """The answers that transformers generates in one batch."""
    model = encoder_models.load(folder)
    ids = np.zeros((len(sources), max(map(len, sources))), np.int64)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    asked = encoder_models.asked("t5", ids, np.array([len(source) for source in sources]))
    start = torch.tensor([[0, *begun]] * len(sources))
    length = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    return model.generate(**asked, decoder_input_ids=start, **length)[:, start.shape[1] :].tolist()


def all_free(llm: LLM) -> bool:
    sources = llm.engine.scheduler.sources
    return tiny.all_free(llm.engine) and sources.available == sources.total


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, forms",
    [("t5_wide", ("x", "x")), ("t5", ("kv", "kv"))],
)
def test_greedy_tokens_of_100_requests_are_transformers(name, forms, folders):
    sources = texts(COUNT)
    want = generated(folders(name), sources)
    assert len({tuple(answer) for answer in want}) > COUNT // 2, "answers that are alike would hide errors"
    llm = served(folders(name), forms, max_num_seqs=LANES)
    assert tiny.tokens(llm.generate(sources, GREEDY, use_tqdm=False)) == want
    assert llm.stats["source_tokens"] == sum(map(len, sources)) and all_free(llm)


@pytest.fixture(scope="module")
def t5(folders):
    return served(folders("t5"), ("kv", "x"))


@pytest.fixture(scope="module")
def answers(folders):
    return generated(folders("t5"), texts())


def poison(llm: LLM) -> None:
    """NaN in every page of both spaces."""
    cache = llm.engine.runner.cache

    def bad(pools):
        return jax.tree.map(lambda x: x * jnp.nan, pools)

    cross = dataclasses.replace(cache.cross, stores=bad(cache.cross.stores))
    llm.engine.runner.cache = dataclasses.replace(cache, stores=bad(cache.stores), cross=cross)


def test_unused_pages_of_either_space_may_hold_nan(t5, answers):
    poison(t5)
    assert tiny.tokens(t5.generate(texts(), GREEDY, use_tqdm=False)) == answers


@pytest.mark.slow
def test_a_preempted_request_encodes_its_source_again(t5, answers):
    llm = t5.replace(num_pages=5, max_num_seqs=4)
    assert tiny.tokens(llm.generate(texts(), GREEDY, use_tqdm=False)) == answers
    assert llm.stats["preemptions"] and all_free(llm)
    assert llm.stats["source_tokens"] > sum(map(len, texts()))


def test_completions_of_a_request_share_its_source(t5, answers):
    both = dataclasses.replace(GREEDY, n=3)
    (output,) = t5.generate([texts()[0]], both, use_tqdm=False)
    assert [one.token_ids for one in output.outputs] == [answers[0]] * 3
    assert t5.stats["source_tokens"] == len(texts()[0]) and all_free(t5)


def test_a_decoder_prompt_is_read_before_the_answer(t5, folders):
    begun = (7, 50, 12, 90, 3)
    want = generated(folders("t5"), texts(), begun=begun)
    prompts = [{"prompt_token_ids": source, "decoder_prompt": list(begun)} for source in texts()]
    assert tiny.tokens(t5.generate(prompts, GREEDY, use_tqdm=False)) == want


@pytest.mark.parametrize("cancels", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_pages_of_both_spaces_come_back_after_random_cancels(cancels, t5):
    """A request that runs all the time gives the same answer as alone."""
    random, engine = np.random.default_rng(0), t5.engine
    one = dataclasses.replace(GREEDY, max_tokens=30)
    (alone,) = t5.generate([texts()[1]], one, use_tqdm=False)
    kept = t5.request(texts()[1], one)
    engine.add(kept)
    found, live = None, []
    for source in texts(cancels, seed=3):
        request = t5.request(source, dataclasses.replace(GREEDY, n=int(random.integers(1, 3))))
        engine.add(request)
        live.append(request.request_id)
        if random.random() < 0.4:
            for group in engine.step():
                found = group.output() if group.finished and group.request is kept else found
        while len(live) > 3:
            engine.abort(live.pop(int(random.integers(len(live)))))
    for name in live:
        engine.abort(name)
    while engine.busy:
        for group in engine.step():
            found = group.output() if group.finished and group.request is kept else found
    assert found.outputs[0].token_ids == alone.outputs[0].token_ids
    assert all_free(t5)


@pytest.mark.slow
def test_nothing_compiles_once_it_is_warm(folders):
    llm = served(folders("t5"), max_num_seqs=2)
    llm.engine.warm_up()
    assert llm.fingerprint  # which a server computes at once, and `generate` at its first request
    with tiny.compilations() as found:
        llm.generate(texts(4), GREEDY, use_tqdm=False)
    assert not found


@pytest.fixture(scope="module")
def whisper(folders):
    return LLM(folders("whisper"), tokenizer=tiny.Bytes(), **SIZES)


def sounds(seed: int = 0) -> list:
    """Less than a window, one, and two and a half."""
    random = np.random.default_rng(seed)
    return [(0.1 * random.standard_normal(n).astype(np.float32), RATE) for n in (9000, RATE, 40_000)]


def heard(folder, frames: np.ndarray, language: str) -> list[int]:
    """The tokens that transformers generates from one window's frames, without the token that ends it."""
    options = {"language": language, "task": "transcribe", "do_sample": False, "return_timestamps": False}
    out = encoder_models.load(folder).generate(torch.tensor(frames).T[None], **options)[0].tolist()
    return [token for token in out if token not in (1, *range(90, 100))]


@pytest.mark.parametrize("language", [None])
def test_sound_is_transcribed_as_transformers_does(language, whisper, folders):
    """Suppressed tokens, language and task; a language that nobody gives is the one that the model hears."""
    theirs = encoder_models.load(folders("whisper"))
    for sound, found in zip(sounds(), whisper.transcribe(sounds(), language), strict=True):
        read = speech.listen(whisper, sound)
        windows = read.windows
        assert found.duration == read.about["duration"] == len(sound[0]) / RATE
        assert (found.rate, found.channels) == (RATE, 1) and len(windows) == len(found.windows)
        if language is None:
            token = theirs.detect_language(torch.tensor(windows[0]).T[None]).item()
            assert encoder_models.LANGUAGES[f"<|{found.language}|>"] == token
        for frames, output in zip(windows, found.windows, strict=True):
            own = [token for token in output.outputs[0].token_ids if token != 1]
            assert own == heard(folders("whisper"), frames, found.language)
        assert found.text == speech.joined(output.outputs[0].text for output in found.windows)
    assert all_free(whisper)


def older(folder, path, **fields):
    """A copy of a folder without lang_to_id and task_to_id, whose tokenizer has the tokens' names."""
    shutil.copytree(folder, path)
    (path / "generation_config.json").unlink()
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | fields))
    tasks = {f"<|{name}|>": index for name, index in encoder_models.TASKS.items()}
    others = {"<|notimestamps|>": 99, "<|startofprev|>": 97}
    names = {index: name for name, index in (encoder_models.LANGUAGES | tasks | others).items()}
    vocab = {names.get(i, f"w{i}"): i for i in range(101)}
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "w0"))
    rust = json.loads(rust.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    rust["added_tokens"] = [{"id": i, "content": names[i], **flags} for i in sorted(names)]
    (path / "tokenizer.json").write_text(json.dumps(rust))
    return path


def test_an_older_whisper_has_the_tokens_that_it_forces(folders, whisper, tmp_path):
    """Fine-tunes of 2022 have no lang_to_id: their language is forced, and others can be asked for."""
    (found,) = whisper.transcribe([sounds()[1]])
    code, index = next((c, i) for c, i in whisper.generation.speech.languages if c != found.language)
    forced = {"forced_decoder_ids": [[1, index], [2, 95], [3, 99]]}
    folder = older(folders("whisper"), tmp_path / "older", **forced, suppress_tokens=[])
    llm = served(folder)
    assert dict(llm.generation.speech.languages) == dict(whisper.generation.speech.languages)
    assert dict(llm.generation.speech.tasks) == dict(whisper.generation.speech.tasks)
    (found,) = llm.transcribe([sounds()[1]])
    assert found.language == code and tuple(found.windows[0].prompt_token_ids) == (90, index, 95, 99)
    (found,) = llm.transcribe([sounds()[1]], "de", "translate")
    assert tuple(found.windows[0].prompt_token_ids) == (90, 92, 94, 99)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="lang_to_id"):
        read_generation_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"forced_decoder_ids": [[1, 99]]}))
    english = read_generation_config(folder).speech
    assert (english.languages, english.no_timestamps) == ((), 99)


@pytest.mark.slow
def test_greedy_tokens_of_100_windows_are_transformers(tmp_path):
    """In one engine; layers read the encoder's output itself. transformers reads all windows in one batch."""
    folder, random = encoder_models.save("whisper", tmp_path, seed=2), np.random.default_rng(0)
    frames, _ = encoder_models.sources("whisper", [50] * COUNT)
    frames += 3 * random.standard_normal((COUNT, 1, 20)).astype(np.float32)  # each has its own spectrum
    llm = served(folder, ("kv", "x"), max_num_seqs=LANES)
    params = skv.SamplingParams(temperature=0.0, max_tokens=20, min_tokens=20)
    asked = [speech.window_request(llm, window, "de", params=params) for window in frames]
    answers = dict(llm.run(asked))
    want = transformers.GenerationMixin.generate(
        encoder_models.load(folder),
        input_features=torch.tensor(frames).transpose(1, 2),
        decoder_input_ids=torch.tensor([asked[0].token_ids] * COUNT),
        do_sample=False,
        max_new_tokens=20,
        min_new_tokens=20,
    )[:, len(asked[0].token_ids) :].tolist()
    assert len({tuple(answer) for answer in want}) > COUNT // 2, "answers that are alike would hide errors"
    assert tiny.tokens([answers[i] for i in range(COUNT)]) == want and all_free(llm)


@pytest.mark.parametrize("language", ["en", None])
def test_a_source_that_is_not_finite_ends_alone(language, whisper, monkeypatch):
    good = sounds()[1]
    want = whisper.transcribe(good, "en").windows[0].outputs[0].token_ids
    with pytest.raises(UsageError):
        whisper.transcribe((good[0] * np.nan, RATE))
    with monkeypatch.context() as patch:
        real, loud = audio.features, np.abs(good[0]).max()
        patch.setattr(audio, "features", lambda x, how: real(x, how) * (np.nan if x.max() > loud else 1))
        with pytest.raises(speech.SpeechError) as error:
            whisper.transcribe([good, (good[0] * 2, RATE), good], language)
    fine, bad, last = error.value.transcriptions
    assert bad.windows[0].outputs[0].finish_reason == "error"
    if language:
        assert fine.windows[0].outputs[0].token_ids == last.windows[0].outputs[0].token_ids == want
    assert all_free(whisper)


def test_text_before_a_window_leaves_room_for_one_token_or_is_refused(whisper):
    (frames,) = speech.listen(whisper, sounds()[1]).windows
    words = np.random.default_rng(0).integers(8, 90, 35).tolist()
    with pytest.raises(UsageError):
        speech.window_request(whisper, frames, "en", previous=words)
    asked = speech.window_request(whisper, frames, "en", previous=words[1:])
    assert asked.token_ids == (97, *words[1:], 90, 91, 95, 99)
    ((_, answer),) = whisper.run([asked])
    assert len(answer.outputs[0].token_ids) == 1 and answer.outputs[0].finish_reason == "length"


def test_unsupported_encoder_inputs_are_refused(t5, whisper, folders):
    good, begun = sounds()[1], {"prompt_token_ids": [5], "decoder_prompt": [3] * 39}
    (folder, sizes), (model, params) = (folders("whisper"), SIZES), skv.from_pretrained(folders("t5"))
    for name, asked in (
        ("audio", lambda: whisper.generate("hello")),
        ("decoder_prompt", lambda: tiny.make().generate(begun)),
        ("audio", lambda: t5.transcribe(good)),
        ("language", lambda: whisper.transcribe(good, "xx")),
        ("task", lambda: whisper.transcribe(good, "en", task="sing")),
        ("audio", lambda: whisper.transcribe((np.zeros(0), RATE))),
        ("audio", lambda: whisper.transcribe([])),
        ("wav", lambda: whisper.transcribe(5)),
        ("41 tokens", lambda: t5.generate([[5] * 41])),
        ("vocabulary", lambda: t5.generate([[101]])),
        ("empty", lambda: t5.generate([[]])),
        ("40 tokens", lambda: t5.generate(begun)),
        ("prompt_logprobs", lambda: t5.generate([[5]], skv.SamplingParams(prompt_logprobs=1))),
        ("max_source_len", lambda: LLM(folder, tokenizer=tiny.Bytes(), max_source_len=49, **sizes)),
        ("max_source_len", lambda: LLM(folder, tokenizer=tiny.Bytes(), max_source_len=51, **sizes)),
        ("t5", lambda: skv.to_swiftkv(model, params, skv.KVPlan.swiftkv(3, 2))),
        ("with_cross", lambda: skv.Transformer(model.config, skv.KVPlan.standard(3))),
    ):
        with pytest.raises(UsageError, match=name):
            asked()
