"""Sound: wav files, channels, rates, windows; frames equal those of transformers' WhisperFeatureExtractor."""

import io
import struct
import tracemalloc
import wave
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import transformers

from swiftkv_jax import audio
from swiftkv_jax.audio import AudioSettings
from swiftkv_jax.common.errors import UsageError

WHISPER = AudioSettings()

WAVS = Path(__file__).with_name("wavs")


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def load(given, rate: int, where: str = "audio") -> np.ndarray:
    sound = audio.read(given, where)
    return audio.resampled(sound.samples, sound.rate, rate)


def wav(samples: np.ndarray, rate: int, width: int = 2) -> bytes:
    """A file of samples [n] or [n, channels] in [-1, 1), as the standard library writes it."""
    out, channels = io.BytesIO(), 1 if samples.ndim == 1 else samples.shape[1]
    if width == 1:
        data = np.round(samples * 127 + 128).astype(np.uint8).tobytes()
    else:
        full = np.round(samples.astype(np.float64) * (2 ** (8 * width - 1) - 1)).astype("<i8").reshape(-1, 1)
        data = full.view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    with wave.open(out, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(data)
    return out.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_wav_file_comes_back_as_its_samples(width, tmp_path):
    want = tone(0.1, 16_000)
    (tmp_path / "a.wav").write_bytes(wav(want, 16_000, width))
    got = load(tmp_path / "a.wav", 16_000)
    np.testing.assert_allclose(got, want, atol=2.0 ** (2 - 8 * width) + 1e-6)
    np.testing.assert_array_equal(load(wav(want, 16_000, width), 16_000), got)


WRITTEN = {  # by soundfile 0.14 (libsndfile 1.2) and ffmpeg 9.0 from source.wav: the largest difference
    "sf_wavex_24": 2**-15,
    "sf_wavex_float": 2**-15,
    "sf_double": 2**-15,
    "sf_rf64_alaw": 2**-7,
    "ff_rf64": 0,
    "ff_pipe": 0,  # sizes of 0xFFFFFFFF, and a title of odd length
}


@pytest.mark.parametrize("name", WRITTEN)
def test_files_of_other_programs_are_read(name):
    want, got = audio.read(WAVS / "source.wav"), audio.read(WAVS / f"{name}.wav")
    assert (got.rate, got.channels) == (want.rate, want.channels) == (8000, 2)
    np.testing.assert_allclose(got.samples, want.samples, atol=WRITTEN[name], rtol=0)


@pytest.mark.parametrize("law", ["alaw", "mulaw"])
def test_all_codes_of_telephone_sound_are_what_ffmpeg_decodes(law):
    got, want = audio.read(WAVS / f"codes_{law}.wav"), audio.read(WAVS / f"codes_{law}_16.wav")
    assert len(want.samples) == 256
    np.testing.assert_array_equal(got.samples, want.samples)


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 4000])
@pytest.mark.parametrize("whole", [0, 36, 0xFFFFFFFF])
def test_data_of_a_length_that_its_writer_did_not_know_is_read_to_the_end(size, whole):
    want = tone(0.1, 16_000)
    data = bytearray(wav(want, 16_000))
    data[4:8], data[40:44] = struct.pack("<I", whole), struct.pack("<I", size)
    np.testing.assert_array_equal(audio.read(bytes(data)).samples, audio.read(wav(want, 16_000)).samples)


def test_no_data_in_a_finished_file_is_no_sound():
    """What follows is a title, not samples."""
    data = wav(np.zeros(0), 16_000) + b"LIST\x04\0\0\0INFO"
    with pytest.raises(UsageError, match="0 s of audio"):
        audio.read(data[:4] + struct.pack("<I", len(data) - 8) + data[8:])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300, 1e30])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_that_are_not_finite_are_named(value, channels):
    """As an array and as a file of 64-bit floats; 1e30 is finite, and its spectrum is not."""
    samples = np.zeros((100, channels))
    samples[[7, 50], 0] = value
    head = struct.pack("<HHIIHH", 3, channels, 16_000, 128_000 * channels, 8 * channels, 64)
    file = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<I", 16) + head + b"data\0\0\0\0" + samples.tobytes()
    for sound in (samples, 16_000), file:
        with pytest.raises(UsageError):
            audio.read(sound, "voice")


def test_channels_are_averaged_and_integers_count_in_full_scale():
    left, right = tone(0.1, 16_000), tone(0.1, 16_000, 1000)
    both = np.stack([left, right], axis=1)
    np.testing.assert_allclose(load((both, 16_000), 16_000), (left + right) / 2, atol=1e-7)
    found = audio.read(wav(np.stack([left, right, left], axis=1), 48_000))
    assert (found.rate, found.channels, found.samples.shape) == (48_000, 3, left.shape)
    np.testing.assert_allclose(found.samples, (2 * left + right) / 3, atol=1e-4)
    whole = np.round(left * 32767).astype(np.int16)
    np.testing.assert_allclose(load((whole, 16_000), 16_000), left, atol=1e-4)


def near(rate: int) -> Fraction:
    """16,000 to `rate`, by numbers of which the smaller has at most 14 bits."""
    return Fraction(16_000, rate).limit_denominator(2**14)


@pytest.mark.parametrize("rate", [15_991, 31_999, 44_100, 63_997, 192_001, 767_999])
def test_a_resampled_sound_is_its_windowed_sinc(rate):
    """The sum over all samples in float64, at some places."""
    random, seconds = np.random.default_rng(rate), 0.2
    times = np.arange(round(seconds * rate)) / rate
    hertz, phases = random.uniform(50, 6000, 20), random.uniform(0, 6, 20)
    sound = np.sin(2 * np.pi * hertz * times[:, None] + phases).mean(axis=1).astype(np.float32)
    got = audio.resampled(sound, rate, 16_000)
    higher = max(1.0, rate / 16_000)
    band, reach = 0.95 / higher, 32 * higher
    for place in map(int, random.integers(100, len(got) - 100, 50)):
        away = float(place / near(rate)) - np.arange(len(sound))
        window = np.cos(np.pi / 2 * np.clip(away / reach, -1, 1)) ** 2
        want = (band * np.sinc(band * away) * window) @ sound
        assert abs(got[place] - want) < 5e-6


@pytest.mark.parametrize("rate, channels", [(63_997, 1), (192_001, 2), (767_999, 1), (767_999, 8)])
def test_memory_is_in_proportion_to_the_samples(rate, channels):
    """Whatever the rates have in common: a filter for 767,999 to 16,000 would take 400 MiB."""
    data = wav(np.zeros((rate // 2, channels)), rate)
    tracemalloc.start()
    try:
        load(data, 16_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20 + 3 * 4 * rate // 2  # the filter, and three copies of one channel


def test_a_wav_file_of_any_bytes_is_a_sound_or_refused_in_one_line():
    """Files of each width, one to three bytes of each changed, or cut off; most near the start."""
    random = np.random.default_rng(0)
    sounds = tone(0.02, 16_000), np.stack([tone(0.02, 16_000)] * 2, axis=1)
    files = [wav(sounds[width % 2], 16_000, width) for width in (1, 2, 3, 4)]
    ends = {"sound": 0, "refused": 0}
    for number in range(4000):
        data = bytearray(files[number % 4])
        for _ in range(random.integers(1, 4)):
            data[random.integers(48 if random.random() < 0.9 else len(data))] = random.integers(256)
        if number % 10 == 0:
            del data[random.integers(len(data)) :]
        try:
            found = load(bytes(data), 16_000)
        except UsageError as error:
            assert "\n" not in str(error)
            ends["refused"] += 1
        else:
            assert found.dtype == np.float32 and found.ndim == 1 and np.isfinite(found).all()
            ends["sound"] += 1
    assert min(ends.values()) > 500, ends


def test_windows_are_of_30_seconds_and_the_last_as_long_as_it_is():
    lengths = [len(part) for part in audio.windows(np.zeros(16_000 * 70 + 5, np.float32), WHISPER)]
    assert lengths == [480_000, 480_000, 160_005]


@pytest.mark.parametrize("mels, seconds", [(80, 30), (128, 4)])
def test_frames_are_those_of_transformers(mels, seconds, tmp_path):
    theirs = transformers.WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds)
    theirs.save_pretrained(tmp_path)
    settings = audio.read_settings(tmp_path, 80)
    assert settings == AudioSettings(mels=mels, seconds=seconds) and settings.frames == 100 * seconds
    sound = tone(2.5, 16_000) + 0.1 * np.random.default_rng(0).standard_normal(40_000).astype(np.float32)
    want = theirs(sound, sampling_rate=16_000, return_tensors="np").input_features[0].T
    got = audio.features(sound, settings)
    assert got.shape == (settings.frames, mels) and got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1e-4)


BAD = {
    "not a wav file": b"ID3\x04mp3",
    "without a format or without data": b"RIFF\0\0\0\0WAVEjunk\0\0\0\0",
    "is empty: 0 s": wav(np.zeros(0), 16_000),
    "must be a wav file's path": 5,
    "No such file": "/nowhere/a.wav",
    "samples must be numbers": (np.array(["a"]), 16_000),
    "rate of 7": (np.zeros(9), 7),
    "format 2, 1 channels of 16 bits": wav(np.zeros(9), 16_000).replace(b"\x01\0\x01\0", b"\x02\0\x01\0", 1),
}


@pytest.mark.parametrize("why", BAD)
def test_invalid_audio_is_refused(why):
    with pytest.raises(UsageError, match=why):
        load(BAD[why], 16_000, "audio")
