"""Convert a Whisper in CTranslate2's format to a folder as Hugging Face publishes it.

CTranslate2's file is a version, a name, a revision and a list of named arrays, little-endian; its projections
are fused (queries, keys and values in one). Only Whisper models in float formats are supported.
"""

import json
import re
import shutil
import struct
import typing
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from swiftkv_jax.common.errors import UsageError

_DTYPES = {0: np.float32, 4: np.float16, 5: ml_dtypes.bfloat16}
_SPECIALS = {
    "start": "startoftranscript",
    "end": "endoftext",
    "no_times": "notimestamps",
    "before": "startofprev",
}
_NORMS = {"gamma": "weight", "beta": "bias"}
_ATTENTION = {"self_attention": "self_attn", "attention": "encoder_attn"}
_LAYER = re.compile(r"(encoder|decoder)/layer_(\d+)/(\w+)/(\w+)/(\w+)")
_WHOLE = {
    "layer_norm/gamma": "layer_norm.weight",
    "layer_norm/beta": "layer_norm.bias",
    "position_encodings/encodings": "embed_positions.weight",
    "embeddings/weight": "embed_tokens.weight",
}
_ENGLISH_ONLY = 51864  # vocabulary size of the English-only models


def read(file: typing.BinaryIO) -> dict[str, np.ndarray]:
    """Name -> array of a model's file.

    Raises:
      UsageError: it is not a Whisper in this format, or its weights are quantised.
    """

    def number(kind: str) -> int:
        size = struct.calcsize(f"<{kind}")
        data = file.read(size)
        if len(data) < size:
            raise UsageError(f"{file.name} is cut off")
        return struct.unpack(f"<{kind}", data)[0]

    def text() -> str:
        return file.read(number("H"))[:-1].decode(errors="replace")

    version, name = number("I"), text()
    if name != "WhisperSpec":
        raise UsageError(f"{file.name} is no Whisper of CTranslate2 (version {version}, {name[:40]!r})")
    number("I")
    arrays = {}
    for _ in range(number("I")):
        name, rank = text(), number("B")
        shape = [number("I") for _ in range(rank)]
        kind, size = number("B"), number("I")
        data = file.read(size)
        if len(data) < size:
            raise UsageError(f"{file.name} is cut off in {name[:60]}")
        if kind in _DTYPES:
            arrays[name] = np.frombuffer(data, _DTYPES[kind]).reshape(shape)
        elif name.endswith("/weight"):
            raise UsageError(f"{file.name}: {name} is quantised; take a model in float16 or float32")
        elif name.endswith("num_heads"):
            arrays[name] = np.frombuffer(data, np.int16)
    return arrays


def published(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays under Hugging Face's names, with fused projections split."""
    out = {}
    for name, array in arrays.items():
        half, _, rest = name.partition("/")
        if found := _LAYER.fullmatch(name):
            layer = f"model.{half}.layers.{found[2]}."
            out |= {layer + part: leaf for part, leaf in _in_layer(*found.groups()[2:], array).items()}
        elif rest in _WHOLE:
            out[f"model.{half}.{_WHOLE[rest]}"] = array
        elif rest.startswith("conv"):
            out[f"model.{half}.{rest.replace('/', '.')}"] = array
    return {name: np.ascontiguousarray(array) for name, array in out.items()}


def _in_layer(part: str, which: str, kind: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of one array of a layer; `part` and `which` say where it belongs, `kind` is "weight",
    "bias" or a norm's array."""
    if part == "ffn":
        names = {"layer_norm": "final_layer_norm", "linear_0": "fc1", "linear_1": "fc2"}
        return {f"{names[which]}.{_NORMS.get(kind, kind)}": array}
    own = _ATTENTION[part]
    if which == "layer_norm":
        return {f"{own}_layer_norm.{_NORMS[kind]}": array}
    joined = {"self_attention": ("qkv", "o"), "attention": ("q", "kv", "o")}[part]
    letters = joined[int(which.removeprefix("linear_"))]
    cut = dict(zip(letters, np.split(array, len(letters)), strict=True))
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    return {f"{own}.{names[a]}.{kind}": leaf for a, leaf in cut.items() if (a, kind) != ("k", "bias")}


def to_folder(model: Path, files: Path, out: Path) -> Path:
    """Write a model file's Whisper as a folder that `from_pretrained` and transformers read.

    model: the file. files: the folder of its config.json and tokenizer.json.

    Raises:
      UsageError: as `read`.
    """
    with model.open("rb") as file:
        arrays = read(file)
    tensors, own = published(arrays), json.loads((files / "config.json").read_text())
    ids = {each["content"].strip("<|>"): each["id"] for each in _added(files)}
    special = {name: ids[token] for name, token in _SPECIALS.items()}
    embedded = tensors["model.decoder.embed_tokens.weight"]
    layers = {
        half: len({name for name in tensors if re.fullmatch(rf"model.{half}.layers.\d+.fc1.bias", name)})
        for half in ("encoder", "decoder")
    }
    common = {
        "decoder_start_token_id": special["start"],
        "bos_token_id": special["end"],
        "eos_token_id": special["end"],
        "pad_token_id": special["end"],
    }
    config = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": len(embedded),
        "d_model": embedded.shape[1],
        "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1],
        "max_source_positions": len(tensors["model.encoder.embed_positions.weight"]),
        "max_target_positions": len(tensors["model.decoder.embed_positions.weight"]),
        "torch_dtype": str(embedded.dtype),
        **common,
    }
    for half, count in layers.items():
        config |= {
            f"{half}_layers": count,
            f"{half}_attention_heads": int(arrays[f"{half}/num_heads"][0]),
            f"{half}_ffn_dim": len(tensors[f"model.{half}.layers.0.fc1.bias"]),
        }
    asked = common | {
        "suppress_tokens": own["suppress_ids"],
        "begin_suppress_tokens": own["suppress_ids_begin"],
        "no_timestamps_token_id": special["no_times"],
        "prev_sot_token_id": special["before"],
        "max_length": config["max_target_positions"],
        "is_multilingual": len(embedded) != _ENGLISH_ONLY,
    }
    if asked["is_multilingual"]:
        languages = [name for name, token in ids.items() if special["start"] < token < ids["translate"]]
        asked["lang_to_id"] = {f"<|{name}|>": ids[name] for name in languages}
        asked["task_to_id"] = {task: ids[task] for task in ("translate", "transcribe")}
    sound = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config["num_mel_bins"],
        "sampling_rate": 16_000,
        "chunk_length": 30,
        "hop_length": 160,
        "n_fft": 400,
    }
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(files / "tokenizer.json", out / "tokenizer.json")
    for name, content in (
        ("config.json", config),
        ("generation_config.json", asked),
        ("preprocessor_config.json", sound),
        ("tokenizer_config.json", words),
    ):
        (out / name).write_text(json.dumps(content, indent=1))
    return out


def _added(files: Path) -> list[dict]:
    return json.loads((files / "tokenizer.json").read_text())["added_tokens"]
