"""Audio input for Whisper's encoder: read, mix to one channel, resample, cut into windows, log-mel.

    sound = audio.read(given)                            # a path, a wav file's bytes, or (array, rate)
    samples = audio.resampled(sound.samples, sound.rate, settings.rate)
    for window in audio.windows(samples, settings):      # 30 s each, the last one as long as it is
        frames = audio.features(window, settings)        # [frames, mels], padded with silence

Nothing here depends on models or requests.
"""

import dataclasses
import functools
import math
import os
import struct
import typing
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np

from swiftkv_jax.common.checks import Checked, integer
from swiftkv_jax.common.errors import UsageError, explained
from swiftkv_jax.common.folder import read_json
from swiftkv_jax.core.shapes import Float

_PCM, _FLOAT, _ALAW, _ULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE  # wav's formats of samples
_UNKNOWN = 0xFFFFFFFF  # a size that is not known, or stands in the chunk "ds64" of RF64
_RATES = (1000, 768_000)  # samples per second
_ZEROS = 32  # zero crossings of the resampling filter, on either side
_LOUDEST = 2.0**40  # beyond integers of any type as floats, and far below where a spectrum overflows
_CUTOFF = 0.95  # cutoff of the filter, as a share of the lower rate's Nyquist frequency
_LONGEST_TERM = 1 << 14  # of the lower rate to the higher
_MIXED_TOGETHER = 1 << 18  # numbers of an array while sound is mixed
PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")  # the latter has the former inside


_Size = Annotated[int, partial(integer, least=1, most=10**6)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AudioSettings(Checked):
    """How audio becomes frames, by preprocessor_config.json; the defaults are Whisper's.

    Attributes:
      rate: samples per second. seconds: of a window. mels: numbers of a frame. width: samples that a frame is
        made from. hop: samples from one frame to the next.
    """

    section = "preprocessor_config.json: "
    mels: _Size = 80
    rate: Annotated[int, partial(integer, least=_RATES[0], most=_RATES[1])] = 16_000
    seconds: _Size = 30
    width: _Size = 400
    hop: _Size = 160

    @property
    def samples(self) -> int:
        """Samples of a window."""
        return self.rate * self.seconds

    @property
    def frames(self) -> int:
        """Frames of a window."""
        return self.samples // self.hop


_NAMES = {"mels": "feature_size", "rate": "sampling_rate", "seconds": "chunk_length"}
_NAMES |= {"width": "n_fft", "hop": "hop_length"}


def read_settings(folder: str | Path, mels: int) -> AudioSettings:
    """Settings from a folder's preprocessor_config.json; without one Whisper's own, with `mels` mel bins."""
    for name in PREPROCESSORS:
        path = Path(folder) / name
        if not path.is_file():
            continue
        raw = read_json(path)
        raw = raw.get("feature_extractor", raw)
        if isinstance(raw, Mapping):
            stated = {ours: raw[theirs] for ours, theirs in _NAMES.items() if raw.get(theirs) is not None}
            return AudioSettings(**({"mels": mels} | stated))
    return AudioSettings(mels=mels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sound:
    """Audio samples, mixed to one channel.

    Attributes:
      samples: in [-1, 1]. rate: samples per second. channels: as many were given, and are averaged.
    """

    samples: Float[np.ndarray, " n"]
    rate: int
    channels: int


@typing.no_type_check  # user input: checked here, by name
def read(audio, where: str = "audio") -> Sound:
    """Read audio at its own rate; several channels are averaged.

    Args:
      audio: the path of a wav file, its bytes, or (samples [n] or [n, channels], their rate); integers count
        in full scale of their type.
      where: opens every error message.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
        sound = _read(audio, where)
    low, high = _RATES
    if not low <= sound.rate <= high:
        raise UsageError(f"{where}: a rate of {sound.rate} samples a second is not in [{low}, {high}]")
    if not sound.samples.size:
        raise UsageError(f"{where} is empty: 0 s of audio")
    if not (sound.samples.min() >= -_LOUDEST and sound.samples.max() <= _LOUDEST):
        wrong = np.flatnonzero(~(np.abs(sound.samples) <= _LOUDEST))
        raise UsageError(f"{where}: sample {wrong[0]}, counted from 0, is {sound.samples[wrong[0]]}")
    return sound


@typing.no_type_check  # user input, as in `read`
def _read(audio, where: str) -> Sound:
    if isinstance(audio, str | os.PathLike):
        with explained(f"read {where} {audio}"):
            audio = Path(audio).expanduser().read_bytes()
    if isinstance(audio, bytes | bytearray | memoryview):
        return _wav(bytes(audio), where)
    if isinstance(audio, tuple | list) and len(audio) == 2 and np.ndim(audio[1]) == 0:
        samples, rate = _array(audio[0], where), integer(f"{where}: rate", audio[1])
        channels = 1 if samples.ndim == 1 else samples.shape[1]
        mono = samples if samples.ndim == 1 or not samples.size else _mixed(samples)
        return Sound(samples=mono.reshape(-1), rate=rate, channels=channels)
    given = type(audio).__name__
    raise UsageError(f"{where} must be a wav file's path, bytes, or (samples, rate), not {given}")


def _mixed(samples: Float[np.ndarray, "n channels"]) -> Float[np.ndarray, " n"]:
    """The mean of the channels."""
    channels = samples.shape[1]
    return samples[:, 0] if channels == 1 else samples @ np.full(channels, 1 / channels, np.float32)


def _array(samples, where: str) -> np.ndarray:
    """Floats of full scale 1, [n] or [n, channels]."""
    samples = np.asarray(samples)
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "iuf":
        given = f"{samples.dtype} {list(samples.shape)}"
        raise UsageError(f"{where}: samples must be numbers [n] or [n, channels], not {given}")
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    info = np.iinfo(samples.dtype)
    middle = 0 if info.min else (info.max + 1) // 2  # unsigned samples are centred on the middle
    return ((samples.astype(np.float64) - middle) / ((int(info.max) + 1) - middle)).astype(np.float32)


def _wav(data: bytes, where: str) -> Sound:
    """The audio of a wav file, mixed a part at a time: all channels as floats may be large."""
    if data[:4] not in (b"RIFF", b"RF64") or data[8:12] != b"WAVE":
        raise UsageError(f"{where} is not a wav file: convert it, as by `ffmpeg -i FILE -ar 16000 out.wav`")
    view, parts, start = memoryview(data), {}, 12
    finished = int.from_bytes(data[4:8], "little") + 8 == len(data)
    while start + 8 <= len(data):
        name, size = struct.unpack("<4sI", view[start : start + 8])
        if name == b"data":  # a streamed file declares 0, or more than it has; RF64's size is in ds64
            if size == _UNKNOWN and len(parts.get(b"ds64", b"")) >= 16:
                size = int.from_bytes(parts[b"ds64"][8:16], "little")
            size = size or (0 if finished else len(data))
        if name in (b"fmt ", b"ds64", b"data"):
            parts.setdefault(name, view[start + 8 : start + 8 + size])
        start += 8 + size + size % 2
    head = parts.get(b"fmt ", b"")
    if len(head) < 16 or b"data" not in parts:
        raise UsageError(f"{where} is a wav file without a format or without data: it is cut off")
    kind, channels, rate, _, block, bits = struct.unpack("<HHIIHH", head[:16])
    if kind == _EXTENSIBLE and len(head) >= 26:
        (kind,) = struct.unpack("<H", head[24:26])
    width = bits // 8
    if not channels or block != channels * width or (kind, bits) not in _READERS:
        known = "PCM of 8 to 32, floats, A-law and mu-law are read"
        raise UsageError(
            f"{where} is a wav file of format {kind}, {channels} channels of {bits} bits, and {known}"
        )
    body, reader = parts[b"data"], _READERS[kind, bits]
    samples = np.empty(len(body) // block, np.float32)
    together = max(1, _MIXED_TOGETHER // channels)
    for start in range(0, len(samples), together):
        stop = min(start + together, len(samples))
        samples[start:stop] = _mixed(reader(body[start * block : stop * block]).reshape(-1, channels))
    return Sound(samples=samples, rate=rate, channels=channels)


def _law(kind: int) -> np.ndarray:
    """The 16-bit samples of all codes of A-law or mu-law (ITU-T G.711)."""
    code = np.arange(256) ^ (0x55 if kind == _ALAW else 0xFF)
    exponent, size = code >> 4 & 7, code & 15
    if kind == _ULAW:
        size = ((size << 3) + 0x84 << exponent) - 0x84
        return np.where(code & 0x80, -size, size).astype("<i2")
    size = np.where(exponent, ((size << 4) + 0x108) << np.maximum(exponent - 1, 0), (size << 4) + 8)
    return np.where(code & 0x80, size, -size).astype("<i2")


def _triples(data: memoryview) -> np.ndarray:
    """24-bit samples as the upper part of 32-bit ones."""
    wide = np.zeros((len(data) // 3, 4), np.uint8)
    wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
    return _array(wide.view("<i4")[:, 0], "")


_READERS = {
    (_PCM, 8): lambda data: _array(np.frombuffer(data, np.uint8), ""),
    (_PCM, 16): lambda data: _array(np.frombuffer(data, "<i2"), ""),
    (_PCM, 24): _triples,
    (_PCM, 32): lambda data: _array(np.frombuffer(data, "<i4"), ""),
    (_FLOAT, 32): lambda data: np.frombuffer(data, "<f4").astype(np.float32),
    (_FLOAT, 64): lambda data: np.frombuffer(data, "<f8").astype(np.float32),
    (_ALAW, 8): lambda data: _array(_law(_ALAW)[np.frombuffer(data, np.uint8)], ""),
    (_ULAW, 8): lambda data: _array(_law(_ULAW)[np.frombuffer(data, np.uint8)], ""),
}


def _ratio(rate: int, wanted: int) -> Fraction:
    """`wanted` to `rate`. One of long terms, as 16,000 to 192,001, is rounded by at most 3e-5, as much as
    clocks of sound cards differ: the resampling filter is as long as the terms."""
    return Fraction(wanted, rate).limit_denominator(_LONGEST_TERM)


def resampled_count(samples: int, rate: int, wanted: int) -> int:
    """The number of samples that `resampled` makes of so many."""
    return math.ceil(samples * _ratio(rate, wanted))


def resampled(samples: Float[np.ndarray, " n"], rate: int, wanted: int) -> Float[np.ndarray, " m"]:
    """Resample from `rate` to `wanted` samples per second; a windowed sinc cuts above the lower Nyquist.

    The sound is extended by silence at both ends.
    """
    if rate == wanted:
        return samples
    from scipy.signal import firwin, resample_poly

    ratio = _ratio(rate, wanted)
    longer = max(ratio.numerator, ratio.denominator)
    low_pass = np.asarray(firwin(2 * _ZEROS * longer + 1, _CUTOFF / longer, window="hann"), np.float32)
    return resample_poly(samples, ratio.numerator, ratio.denominator, window=low_pass)


def windows(samples: Float[np.ndarray, " n"], settings: AudioSettings) -> list[Float[np.ndarray, " w"]]:
    """The audio in windows of `settings.seconds`, one after the other; the last may be shorter."""
    size = settings.samples
    return [samples[start : start + size] for start in range(0, len(samples), size)]


@functools.lru_cache(maxsize=8)
def _filters(settings: AudioSettings) -> tuple[np.ndarray, np.ndarray]:
    """(mel filters, window) of transformers' WhisperFeatureExtractor."""
    from transformers.audio_utils import mel_filter_bank, window_function

    mel = mel_filter_bank(
        num_frequency_bins=1 + settings.width // 2,
        num_mel_filters=settings.mels,
        min_frequency=0.0,
        max_frequency=8000.0,
        sampling_rate=settings.rate,
        norm="slaney",
        mel_scale="slaney",
    )
    return mel, window_function(settings.width, "hann")


def features(window: Float[np.ndarray, " w"], settings: AudioSettings) -> Float[np.ndarray, "frames mels"]:
    """The log-mel frames of one window of at most `settings.samples` samples, padded with silence.

    The same as WhisperFeatureExtractor: log10 of the mel spectrum, clipped to 8 below its largest value,
    then (x + 4) / 4.
    """
    from transformers.audio_utils import spectrogram

    mel, hann = _filters(settings)
    whole = np.zeros(settings.samples, np.float32)
    whole[: len(window)] = window
    mels = spectrogram(
        whole, hann, settings.width, settings.hop, power=2.0, mel_filters=mel, log_mel="log10"
    )[:, :-1]
    mels = (np.maximum(mels, mels.max() - 8.0) + 4.0) / 4.0
    return np.ascontiguousarray(mels.T, np.float32)
