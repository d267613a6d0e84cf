"""Sound as Whisper's encoder takes it: read, mixed to one channel, resampled, cut into windows, as log-mel.

    samples = audio.load(sound, settings.rate)           # a path, a wav file's bytes, or (array, rate)
    for window in audio.windows(samples, settings):      # 30 s each, the last one as long as it is
        frames = audio.features(window, settings)        # [frames, mels], silence behind the window's end

Nothing here knows a model or a request.
"""

import dataclasses
import functools
import math
import os
import struct
import typing
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from swiftkv_jax.checks import integer
from swiftkv_jax.errors import UsageError, explained
from swiftkv_jax.folder import read_json
from swiftkv_jax.shapes import Float

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE  # wav's formats of samples
_RATES = (1000, 768_000)  # samples a second
_ZEROS = 32  # of the resampling filter, on either side
_CUTOFF = 0.95  # of it, as a share of what the lower rate can hold
_TOGETHER = 1 << 15  # samples that are resampled at a time
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")  # the latter has the former inside


@dataclasses.dataclass(frozen=True, kw_only=True)
class AudioSettings:
    """How sound becomes frames, as preprocessor_config.json says it; the defaults are Whisper's.

    Attributes:
      rate: samples a second. seconds: of a window. mels: numbers of a frame. width: samples that a frame is
        made from. hop: samples from one frame to the next.
    """

    mels: int = 80
    rate: int = 16_000
    seconds: int = 30
    width: int = 400
    hop: int = 160

    def __post_init__(self):
        for field in dataclasses.fields(self):
            integer(f"preprocessor_config.json: {field.name}", getattr(self, field.name), 1, 10**6)

    @property
    def samples(self) -> int:
        """Samples of a window."""
        return self.rate * self.seconds

    @property
    def frames(self) -> int:
        """Frames of a window."""
        return self.samples // self.hop


_NAMES = {
    "mels": "feature_size",
    "rate": "sampling_rate",
    "seconds": "chunk_length",
    "width": "n_fft",
    "hop": "hop_length",
}


def read_settings(folder: str | Path, mels: int) -> AudioSettings:
    """What a folder's preprocessor_config.json says; without one Whisper's own, of `mels` numbers a frame.

    Raises:
      UsageError: it cannot be read.
    """
    for name in _PREPROCESSORS:
        path = Path(folder) / name
        if not path.is_file():
            continue
        raw = read_json(path)
        raw = raw.get("feature_extractor", raw)
        if isinstance(raw, Mapping):
            found = {ours: raw[theirs] for ours, theirs in _NAMES.items() if raw.get(theirs) is not None}
            return AudioSettings(**({"mels": mels} | found))
    return AudioSettings(mels=mels)


@typing.no_type_check  # user input: checked here, by name
def load(audio, rate: int, where: str = "audio") -> Float[np.ndarray, " n"]:
    """Samples in [-1, 1] at `rate`, one channel: several are averaged, another rate is resampled.

    Args:
      audio: the path of a wav file, its bytes, or (samples [n] or [n, channels], their rate); integers count
        in full scale of their type.
      where: opens every error message.

    Raises:
      UsageError: it is none of these, not a wav file that is understood here, or has no samples.
    """
    if isinstance(audio, str | os.PathLike):
        with explained(f"read {where} {audio}"):
            audio = Path(audio).expanduser().read_bytes()
    if isinstance(audio, bytes | bytearray | memoryview):
        samples, own = _wav(bytes(audio), where)
    elif isinstance(audio, tuple | list) and len(audio) == 2 and np.ndim(audio[1]) == 0:
        samples, own = _array(audio[0], where), integer(f"{where}: rate", audio[1])
    else:
        raise UsageError(
            f"{where} must be the path of a wav file, its bytes, or (samples, rate), not "
            f"{type(audio).__name__}"
        )
    if not _RATES[0] <= own <= _RATES[1]:
        raise UsageError(f"{where}: a rate of {own} samples a second is not in [{_RATES[0]}, {_RATES[1]}]")
    if not samples.size:
        raise UsageError(f"{where} is empty: 0 s of sound")
    mono = samples if samples.ndim == 1 else samples.mean(axis=1)
    return resampled(mono.astype(np.float32), own, rate)


def _array(samples, where: str) -> np.ndarray:
    """Floats of full scale 1, [n] or [n, channels]."""
    samples = np.asarray(samples)
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "iuf":
        raise UsageError(
            f"{where}: samples must be numbers [n] or [n, channels], not {samples.dtype} "
            f"{list(samples.shape)}"
        )
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    info = np.iinfo(samples.dtype)
    middle = 0 if info.min else (info.max + 1) // 2  # unsigned ones lie around the middle
    return ((samples.astype(np.float64) - middle) / ((int(info.max) + 1) - middle)).astype(np.float32)


def _wav(data: bytes, where: str) -> tuple[np.ndarray, int]:
    """(samples [n, channels] as floats, rate) of a wav file."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise UsageError(f"{where} is not a wav file: convert it, as by `ffmpeg -i FILE -ar 16000 out.wav`")
    parts, at = {}, 12
    while at + 8 <= len(data):
        name, size = struct.unpack("<4sI", data[at : at + 8])
        parts.setdefault(name, data[at + 8 : at + 8 + size])  # a stream's size may be longer than its data
        at += 8 + size + size % 2
    head = parts.get(b"fmt ", b"")
    if len(head) < 16 or b"data" not in parts:
        raise UsageError(f"{where} is a wav file without a format or without data: it is cut off")
    kind, channels, rate, _, block, bits = struct.unpack("<HHIIHH", head[:16])
    if kind == _EXTENSIBLE and len(head) >= 26:
        (kind,) = struct.unpack("<H", head[24:26])
    width = bits // 8
    if not channels or block != channels * width or (kind, bits) not in _READERS:
        raise UsageError(
            f"{where} is a wav file of format {kind}, {channels} channels of {bits} bits: PCM of 8, 16, 24 "
            "or 32 bits and floats of 32 or 64 are read"
        )
    body = parts[b"data"]
    samples = _READERS[kind, bits](body[: len(body) // block * block])
    return samples.reshape(-1, channels), rate


def _triples(data: bytes) -> np.ndarray:
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
}


def resampled(samples: Float[np.ndarray, " n"], rate: int, wanted: int) -> Float[np.ndarray, " m"]:
    """Samples at `wanted` a second of those at `rate`, by a windowed sinc that cuts what the lower holds not.

    Beyond both ends there is silence.
    """
    if rate == wanted:
        return samples
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    band = _CUTOFF * min(1.0, wanted / rate)
    reach = math.ceil(_ZEROS / band)
    taps = np.arange(1 - reach, reach + 1)
    out = np.empty(max(1, len(samples) * wanted // rate), np.float32)
    padded = np.pad(samples, (reach, 2 * reach))
    for start in range(0, len(out), _TOGETHER):
        at = np.arange(start, min(start + _TOGETHER, len(out)))
        whole, part = at * down // up, at * down % up
        phases, which = np.unique(part, return_inverse=True)
        back = taps - phases[:, None] / up
        weights = band * np.sinc(band * back) * np.cos(np.pi / 2 * np.clip(back / reach, -1, 1)) ** 2
        held = padded[whole[:, None] + taps + reach]
        out[at] = np.einsum("nt,nt->n", held, weights.astype(np.float32)[which])
    return out


def windows(samples: Float[np.ndarray, " n"], settings: AudioSettings) -> list[Float[np.ndarray, " w"]]:
    """The sound in windows of `settings.seconds`, one after the other; the last may be shorter."""
    size = settings.samples
    return [samples[at : at + size] for at in range(0, len(samples), size)]


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
    """The log-mel frames of one window of at most `settings.samples` samples, silence behind its end.

    What WhisperFeatureExtractor computes: log10 of the mel spectrum, no more than 8 below its largest, then
    (x + 4) / 4.
    """
    from transformers.audio_utils import spectrogram

    mel, hann = _filters(settings)
    whole = np.zeros(settings.samples, np.float32)
    whole[: len(window)] = window
    found = spectrogram(
        whole, hann, settings.width, settings.hop, power=2.0, mel_filters=mel, log_mel="log10"
    )[:, :-1]
    found = (np.maximum(found, found.max() - 8.0) + 4.0) / 4.0
    return np.ascontiguousarray(found.T, np.float32)
