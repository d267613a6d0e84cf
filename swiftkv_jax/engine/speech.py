"""Speech recognition with Whisper: audio as one request per window of 30 s, and their answers as one text.

    for frames in listen(llm, sound).windows:                  # a path, wav bytes, or (samples, rate)
        request = window_request(llm, frames, "en", "transcribe", params)
        ...                                                    # run by the engine, as any other
    text = joined(texts)

If no language is given, `language_request` asks the model for it. `run` does all of this for several inputs.
"""

import dataclasses
import functools
import operator
import typing
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from swiftkv_jax import audio
from swiftkv_jax.audio import AudioSettings
from swiftkv_jax.common.errors import UsageError, suggest
from swiftkv_jax.core.shapes import Float
from swiftkv_jax.engine.request import (
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from swiftkv_jax.engine.validate import decoder_start

TASKS = ("transcribe", "translate")
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
Frames = Float[np.ndarray, "frames mels"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcription:
    """The text of one audio input.

    Attributes:
      text: of all windows. language: its code, None if the model knows only one. duration: seconds.
      windows: the answer to each window's request.
      rate, channels: of the audio as it was given, before it was resampled and mixed.
    """

    text: str
    language: str | None
    duration: float
    rate: int
    channels: int
    windows: list[RequestOutput]


class SpeechError(RuntimeError):
    """The model failed on a window of some audio, which the message names.

    Attributes:
      transcriptions: of every audio input; the text of one that failed lacks those windows.
    """

    def __init__(self, message: str, transcriptions: list[Transcription]):
        super().__init__(message)
        self.transcriptions = transcriptions


def takes_audio(llm) -> bool:
    within = llm.model.config.encoder
    return within is not None and bool(within.mels)


def settings(llm) -> AudioSettings:
    """The conversion of audio to the frames that the model was trained on."""
    within = llm.model.config.encoder
    if within is None or not within.mels:
        raise UsageError(f"{llm.model.config.family} takes text, not audio: pass a prompt to generate")
    frames, plain = 2 * within.max_position_embeddings, AudioSettings()
    source = llm.model.config.source
    if source is not None:
        how = audio.read_settings(source, within.mels)
    else:
        how = dataclasses.replace(plain, mels=within.mels, seconds=max(1, frames * plain.hop // plain.rate))
    if (how.frames, how.mels) != (frames, within.mels):
        wanted, made = f"{frames} frames of {within.mels} numbers", f"{how.frames} of {how.mels}"
        raise UsageError(f"the model takes {wanted}, and its preprocessor_config.json makes {made}")
    return how


def language_code(named: str, languages: Iterable[str], where: str = "language") -> str:
    """The code of a language given by its code or its English name."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    known, low = list(languages), str(named).lower().strip("<|>")
    code = low if low in known else TO_LANGUAGE_CODE.get(low, low)
    if code not in known:
        raise UsageError(f"{where} {named!r} is not one of {', '.join(known)}{suggest(low, known)}")
    return code


def prompt_tokens(
    llm, language: str | None, task: str = "transcribe", previous: Sequence[int] = (), where: str = "audio"
) -> list[int]:
    """The decoder's prompt: preceding text, language, task, no timestamps."""
    speech = llm.generation.speech
    languages, tasks = dict(speech.languages), dict(speech.tasks)
    if task not in TASKS:
        raise UsageError(f"{where}: task must be one of {', '.join(TASKS)}, not {task!r}")
    opened = [speech.previous, *previous] if previous and speech.previous is not None else []
    out = [*opened, decoder_start(llm)]
    if languages:
        if language is None:
            raise UsageError(f"{where}: the language must be given, or asked for by language_request")
        out.append(languages[language_code(language, languages, f"{where}: language")])
    elif language is not None and language_code(language, ["en"], f"{where}: language") != "en":
        raise UsageError(f"{where}: this model supports English only")
    if tasks:
        out.append(tasks[task])
    elif task != "transcribe":
        raise UsageError(f"{where}: this model cannot {task}: it supports one language")
    return out if speech.no_timestamps is None else [*out, speech.no_timestamps]


def window_request(
    llm,
    frames: Frames,
    language: str | None,
    task: str = "transcribe",
    params: SamplingParams | None = None,
    previous: Sequence[int] = (),
    where: str = "audio",
) -> Request:
    """The request for the text of one window."""
    speech = llm.generation.speech
    prompt = prompt_tokens(llm, language, task, previous, where)
    first = tuple(token for token in speech.first_suppressed if token < llm.model.config.vocab_size)
    ruled_out = {"bad_ids": tuple((token,) for token in speech.suppressed), "first_bad_ids": first}
    return llm.make_request(None, prompt, params or GREEDY, where, **_source_of(frames), **ruled_out)


def language_request(llm, frames: Frames) -> Request | None:
    """The request whose only output token is the language of a window; None if the model knows only one."""
    languages = [token for _, token in llm.generation.speech.languages]
    if not languages:
        return None
    params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=languages, ignore_eos=True)
    return llm.make_request(None, [decoder_start(llm)], params, "audio", **_source_of(frames))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dictation:
    """An audio input as the model takes it, and how it is transcribed.

    Attributes:
      windows: the frames of each. language: its code, None if the model knows only one. question: the request
        for the language, if it is not given; until it is answered, `language` is the first that the model
        knows.
      task, params, previous, where: as of `window_request`; `previous` precedes the first window.
      about: its duration in seconds, and rate and channels of the audio before it was resampled and mixed.
    """

    windows: list[Frames]
    language: str | None
    question: Request | None
    task: str
    params: SamplingParams
    previous: Sequence[int]
    where: str
    about: dict[str, typing.Any]

    def requests(self, llm) -> list[Request]:
        """The request of each window."""
        pairs = zip(self.windows, [self.previous, *[()] * (len(self.windows) - 1)], strict=True)
        options = self.language, self.task, self.params
        return [window_request(llm, frames, *options, ids, self.where) for frames, ids in pairs]

    def answered(self, llm, tokens: Sequence[int]) -> "Dictation":
        """The same with the language that the answer to `question` names, if it names one."""
        codes = {token: code for code, token in llm.generation.speech.languages}
        return dataclasses.replace(self, language=next(map(codes.get, tokens), None) or self.language)


def listen(
    llm,
    sound,
    language: str | None = None,
    task: str = "transcribe",
    params: SamplingParams | None = None,
    previous: Sequence[int] = (),
    where: str = "audio",
    most: int | None = None,
) -> Dictation:
    """The dictation of an audio input of at most `most` windows, in a language by its code or name."""
    how, given = settings(llm), audio.read(sound, where)
    length = audio.resampled_count(len(given.samples), given.rate, how.rate)
    count = -(-length // how.samples)
    if most is not None and count > most:  # refused before it takes memory: a low rate makes much of little
        said = f"{length / how.rate:.0f} s of audio in {count} windows"
        raise UsageError(f"{where}: {said}; at most {most} may come at once")
    samples = audio.resampled(given.samples, given.rate, how.rate)
    windows = [audio.features(window, how) for window in audio.windows(samples, how)]
    codes, question = [code for code, _ in llm.generation.speech.languages], None
    if (language := language or llm.generation.speech.language) is not None:
        language = language_code(language, codes or ["en"])
    else:
        language, question = next(iter(codes), None), language_request(llm, windows[0])
    about = {"duration": len(samples) / how.rate, "rate": given.rate, "channels": given.channels}
    options = {"task": task, "params": params or GREEDY, "previous": previous, "where": where}
    return Dictation(windows=windows, language=language, question=question, about=about, **options)


def run(llm, dictations: Sequence[Dictation]) -> Iterator[tuple[int, Dictation, list[RequestOutput]]]:
    """Yield (number, dictation with its language, answers to its windows) of each as it finishes. Where the
    model fails on the question for the language, that is the only answer."""
    asking = [i for i, each in enumerate(dictations) if each.question is not None]
    answers = dict(llm.run([dictations[i].question for i in asking]))
    known = dict(enumerate(dictations))
    for number, i in enumerate(asking):
        if answers[number].outputs[0].finish_reason == "error":
            yield i, known.pop(i), [answers[number]]
        else:
            known[i] = known[i].answered(llm, answers[number].outputs[0].token_ids)
    requests = {i: each.requests(llm) for i, each in known.items()}
    windows = [(i, window) for i, of_one in requests.items() for window in range(len(of_one))]
    outputs: dict[int, dict[int, RequestOutput]] = {i: {} for i in known}
    for place, output in llm.run([request for of_one in requests.values() for request in of_one]):
        i, window = windows[place]
        outputs[i][window] = output
        if len(outputs[i]) == len(requests[i]):
            yield i, known[i], [of_window for _, of_window in sorted(outputs.pop(i).items())]


def _source_of(frames: Frames) -> dict[str, typing.Any]:
    return {"source": frames, "source_length": len(frames) // 2}


def joined(texts: Iterable[str]) -> str:
    """Join the texts of neighbouring windows."""
    return " ".join(text.strip() for text in texts if text.strip())


def whole(windows: Sequence[RequestOutput]) -> RequestOutput:
    """Join the answers to the windows of one audio input into one, with the worst of their finish reasons."""
    outputs, times = [window.outputs[0] for window in windows], [window.metrics for window in windows]
    worst = max(outputs, key=lambda answer: _WORSE.index(answer.finish_reason))
    begun = [m.first_token_time for m in times if m.output_tokens]
    output = CompletionOutput(
        index=0,
        text=joined(answer.text for answer in outputs),
        token_ids=[token for answer in outputs for token in answer.token_ids],
        cumulative_logprob=_sum(answer.cumulative_logprob for answer in outputs),
        logprobs=_sum(answer.logprobs for answer in outputs),
        finish_reason=worst.finish_reason,
        stop_reason=worst.stop_reason,
        error=worst.error,
    )
    metrics = RequestMetrics(
        arrival_time=min(m.arrival_time for m in times),
        scheduled_time=min(m.scheduled_time for m in times),
        first_token_time=min(begun, default=0.0),
        finished_time=max(m.finished_time for m in times),
        output_tokens=sum(m.output_tokens for m in times),
    )
    return RequestOutput(
        request_id=windows[0].request_id,
        prompt=None,
        prompt_token_ids=[token for window in windows for token in window.prompt_token_ids],
        outputs=[output],
        metrics=metrics,
    )


_WORSE = (None, "stop", "length", "abort", "error")  # finish reasons, the best first


def _sum(parts: Iterable):
    """Numbers added, or lists one after the other; None where any is None."""
    known = list(parts)
    return None if any(part is None for part in known) else functools.reduce(operator.add, known)


def transcribe(
    llm, sounds: list, language: str | None, task: str, params: SamplingParams | None
) -> list[Transcription]:
    """`LLM.transcribe` for several audio inputs at once."""
    if not sounds:
        raise UsageError("audio is empty: give at least one file")
    names = [f"audio[{i}]" if len(sounds) > 1 else "audio" for i in range(len(sounds))]
    pairs = zip(sounds, names, strict=True)
    dictations = [listen(llm, sound, language, task, params, where=name) for sound, name in pairs]
    prompt_tokens(llm, dictations[0].language, task)  # errors are raised before anything runs
    done = {i: (each, windows) for i, each, windows in run(llm, dictations)}
    out, wrong = [], []
    for i, name in enumerate(names):
        each, windows = done[i]
        text = joined(window.outputs[0].text for window in windows)
        out.append(Transcription(text=text, language=each.language, windows=windows, **each.about))
        for number, output in enumerate(windows, 1):
            if output.outputs[0].finish_reason == "error":
                place = f"{name}, window {number} of {len(each.windows)}"
                wrong.append(f"{place}: {output.outputs[0].error}")
    if wrong:
        raise SpeechError(f"the model failed on {'; '.join(wrong)}", out)
    return out
