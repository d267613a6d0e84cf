"""Sources for a model with an encoder, with the model's own answers to them, as two halves.

In use, a decoder's cache holds rows of the model's own output. So texts are answered and sounds transcribed
greedily, in float32, and the answers are read again beside their sources. For T5 a source is a piece of a
document, for Whisper a window of a sound file.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.checkpoint.generation import read_generation_config
from swiftkv_jax.common.errors import UsageError, explained
from swiftkv_jax.common.progress import Doing
from swiftkv_jax.core.encoder import encode
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.engine import speech
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import RequestOutput, SamplingParams
from swiftkv_jax.slim import texts
from swiftkv_jax.slim.texts import BATCH, KEPT, MOST, PIECE, Beside, Pieces
from swiftkv_jax.text.tokenizer import load_tokenizer

ANSWER = 128  # tokens of an answer to a text, at most


@dataclasses.dataclass(frozen=True)
class _Answered:
    """A source (token ids or audio frames), its positions, and the tokens that the decoder reads with it."""

    source: np.ndarray
    positions: int
    tokens: list[int]


def read(
    text: str | None, sounds: Sequence[str], folder: Path, model: Transformer, params: PyTree, doing: Doing
) -> tuple[Pieces, Pieces]:
    """(to fit on, to measure on), of a file of documents or of wav files, for the model in `folder`."""
    config = model.config
    assert config.encoder is not None
    hears = bool(config.encoder.mels)
    if hears != bool(sounds) or (hears and text):
        wanted = "audio: give --audio, wav files or folders of them" if hears else "text: give --text"
        raise UsageError(f"{config.family} takes {wanted}")
    limit = None if config.encoder.learned_positions else PIECE
    tokenizer, generation = load_tokenizer(folder), read_generation_config(folder)
    sizes = {"max_num_seqs": BATCH, "max_source_len": limit}
    llm = LLM.from_model(model, params, tokenizer, generation=generation, **sizes)
    files: list[Path] = []
    for path in map(Path, sounds):
        wavs = sorted(path.rglob("*.wav")) if path.is_dir() else [path]
        if not wavs:
            raise UsageError(f"--audio {path} holds no .wav files")
        files += wavs
    documents = _transcribed(llm, doing.counted(files)) if hears else doing.counted(_answered(llm, text))
    sides = texts.apart(
        documents, config.hidden_size, lambda said: sum(len(answer.tokens) for answer in said)
    )
    fit, kept = (list(itertools.chain.from_iterable(side)) for side in sides)
    what = f"the model's answer to the {'audio' if hears else 'text'}"
    texts.check_enough(_count(fit), _count(kept), config.hidden_size, what)
    shape = max(len(answer.tokens) for answer in fit + kept), max(len(answer.source) for answer in fit + kept)
    most = MOST * config.hidden_size
    return _pieces(model, params, fit, most, shape), _pieces(model, params, kept, KEPT, shape)


def _count(answers: list[_Answered]) -> int:
    """Number of tokens, or of source positions if these are fewer."""
    return min(sum(len(answer.tokens) for answer in answers), sum(answer.positions for answer in answers))


def _transcribed(llm: LLM, files: Iterable[Path]) -> Iterator[list[_Answered]]:
    """The windows of each file with their transcripts, in the language that the model detects."""
    for file in files:
        with explained(f"read {file}"):
            sound = file.read_bytes()
        ((_, heard, outputs),) = speech.run(llm, [speech.listen(llm, sound, where=str(file))])
        pairs = zip(heard.windows, outputs, strict=True)
        yield [_Answered(window, len(window) // 2, _read(llm, output)) for window, output in pairs]


def _answered(llm: LLM, text: str | None) -> Iterator[list[_Answered]]:
    """The pieces of each document, each with the model's answer."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    most = min(ANSWER, llm.settings.max_model_len - 1)
    params = SamplingParams(temperature=0.0, max_tokens=most)
    for document in texts.encoded(text, tokenizer):
        end = document[-1:] if document[-1] in llm.eos_ids else []
        body, size = document[: len(document) - len(end)], PIECE - len(end)
        pieces = [[*body[start : start + size], *end] for start in range(0, len(body), size)]
        answers = dict(llm.run([llm.request(piece, params) for piece in pieces]))
        yield [_Answered(np.array(x, np.int32), len(x), _read(llm, answers[i])) for i, x in enumerate(pieces)]


def _read(llm: LLM, output: RequestOutput) -> list[int]:
    """All tokens that the decoder has read once it has generated its last token."""
    (answer,) = output.outputs
    if answer.finish_reason == "error":
        raise UsageError(f"the model fails on its calibration data: {answer.error}")
    return [*output.prompt_token_ids, *answer.token_ids][:-1]


def _pieces(
    model: Transformer, params: PyTree, answers: list[_Answered], most: int, shape: tuple[int, int]
) -> Pieces:
    """The first items, up to about `most` tokens, padded to `shape` (tokens, source)."""
    ends = np.cumsum([len(answer.tokens) for answer in answers])
    answers = answers[: 1 + int(np.searchsorted(ends, most))]
    tokens = np.zeros((len(answers), shape[0]), np.int32)
    real = np.zeros(tokens.shape, bool)
    for row, answer in enumerate(answers):
        tokens[row, : len(answer.tokens)], real[row, : len(answer.tokens)] = answer.tokens, True
    lengths = np.array([answer.positions for answer in answers], np.int32)
    blank = np.zeros((shape[1], *answers[0].source.shape[1:]), answers[0].source.dtype)
    sources = np.stack([np.concatenate([answer.source, blank[len(answer.source) :]]) for answer in answers])
    run = jax.jit(lambda source, lengths: encode(model, params, source, lengths).x)
    x = []
    for i in range(0, len(answers), BATCH):
        rows = np.minimum(np.arange(i, i + BATCH), len(answers) - 1)
        x.append(np.asarray(run(jnp.asarray(sources[rows]), jnp.asarray(lengths[rows])))[: len(answers) - i])
    x = np.concatenate(x)
    some = np.zeros(x.shape[:2], bool)  # positions that are not padding, at most `most`, evenly spread
    places = np.flatnonzero(np.arange(x.shape[1]) < lengths[:, None])
    chosen = np.linspace(0, len(places) - 1, min(most, len(places))).astype(int)
    some.reshape(-1)[places[chosen]] = True
    return Pieces(tokens, real, Beside(x, lengths, some))
