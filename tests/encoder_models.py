"""Small random T5 and Whisper models of transformers, saved as a user would find them."""

import io
import struct
import wave
from pathlib import Path

import numpy as np
import torch
import transformers

transformers.utils.logging.disable_progress_bar()

_T5 = {
    "vocab_size": 101,
    "d_model": 48,
    "d_kv": 16,
    "d_ff": 80,
    "num_layers": 3,  # transformers' cache has as many layers as the encoder
    "num_decoder_layers": 3,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_WHISPER = {
    "vocab_size": 101,
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 80,
    "num_mel_bins": 20,
    "max_source_positions": 50,  # a second of sound
    "max_target_positions": 40,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 90,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
}
# name -> (family, fields that differ)
CASES: dict[str, tuple[str, dict]] = {
    "t5": ("t5", {}),
    "t5_wide": (  # 80 columns of 48 inputs, as T5-3B and 11B
        "t5",
        {
            "d_kv": 20,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "num_layers": 3,
            "num_decoder_layers": 2,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
        },
    ),
    "whisper": ("whisper", {}),
}
# The ids in a Whisper's generation_config.json, for so small a vocabulary.
LANGUAGES = {"<|en|>": 91, "<|de|>": 92, "<|fr|>": 93}
TASKS = {"translate": 94, "transcribe": 95}
SPEAKING = {
    "lang_to_id": LANGUAGES,
    "task_to_id": TASKS,
    "no_timestamps_token_id": 99,
    "is_multilingual": True,
    "prev_sot_token_id": 97,
    "suppress_tokens": [2, 5, 7, *range(90, 100)],
    "begin_suppress_tokens": [3, 1],
    "max_length": 40,
}


def make(name: str, seed: int = 0, **changes) -> transformers.PreTrainedModel:
    """A random model whose norms and biases are random too, and whose logits differ by units; `changes` of
    the case's config."""
    family, fields = CASES[name]
    fields = fields | changes
    base, kind = {
        "t5": (_T5, transformers.T5ForConditionalGeneration),
        "whisper": (_WHISPER, transformers.WhisperForConditionalGeneration),
    }[family]
    config = transformers.AutoConfig.for_model(family, **(base | fields))
    config._attn_implementation = "eager"
    model = kind(config).eval()
    if family == "t5" and not config.scale_decoder_outputs:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    tied = family == "whisper" or config.scale_decoder_outputs
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=random)
            if key.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "norm" in key:
                # A tied head would say the last token again: embeddings are small, and the last norm is not.
                last = key in ("decoder.final_layer_norm.weight", "model.decoder.layer_norm.weight")
                weight.copy_((1 + 0.3 * noise) * (_LOUD if last and tied else 1.0))
            elif "relative" in key:
                weight.copy_(noise)
            elif "embed" in key or "shared" in key:
                weight.copy_(noise * (0.3 if tied else 1.0))
            else:
                inputs = weight[0].numel()
                # T5's scores are not scaled: its queries are, as they are trained.
                small = 0.3 if "SelfAttention.q" in key or "EncDecAttention.q" in key else 1.0
                loud = 2.5 if key.split(".")[-2] in _OUTPUTS else 1.0
                made = noise * small * loud * (3.0 if "lm_head" in key else 1.3) * inputs**-0.5
                weight.copy_(_conditioned(made) if key.split(".")[-2] in _INVERTED else made)
    if family == "whisper":
        ids = {name: _WHISPER[name] for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = transformers.GenerationConfig(**ids, **SPEAKING)
    return model


_LOUD = 8.0
_OUTPUTS = ("o", "wo", "out_proj", "fc2")  # larger: else a stream stays what it began as
_INVERTED = ("k", "v", "k_proj", "v_proj")


def _conditioned(kernel: torch.Tensor) -> torch.Tensor:
    """The kernel with a condition number of at most 50, so that its inverse in float32 loses two digits."""
    u, s, v = torch.linalg.svd(kernel, full_matrices=False)
    return u @ torch.diag(s.clamp(min=s[0] / 50)) @ v


def save(name: str, folder: Path, seed: int = 0, **changes) -> Path:
    """Save as transformers does; returns the folder."""
    make(name, seed, **changes).save_pretrained(folder)
    return folder


def load(folder: Path) -> transformers.PreTrainedModel:
    """Load as transformers does."""
    family = transformers.AutoConfig.from_pretrained(folder).model_type
    kind = {
        "t5": transformers.T5ForConditionalGeneration,
        "whisper": transformers.WhisperForConditionalGeneration,
    }[family]
    return kind.from_pretrained(folder, attn_implementation="eager").eval()


def sources(family: str, lengths: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(a batch of sources, their lengths): of T5 ragged token ids, of Whisper frames of a whole window."""
    random = np.random.default_rng(seed)
    if family == "whisper":
        return random.standard_normal((len(lengths), 100, 20)).astype(np.float32), np.full(len(lengths), 50)
    ids = np.zeros((len(lengths), max(lengths)), np.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = random.integers(2, 101, length)
    return ids, np.array(lengths)


def wav(seconds: float, seed: int = 0, rate: int = 16_000, channels: int = 1) -> bytes:
    """A wav file of noise."""
    samples = np.random.default_rng(seed).integers(-9000, 9000, (round(seconds * rate), channels))
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return out.getvalue()


def wav_with_nan() -> bytes:
    """A wav file of 800 32-bit floats, of which one is NaN."""
    samples = np.zeros(800, "<f4")
    samples[5] = np.nan
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 3236, b"WAVE", b"fmt ", 16, 3, 1, 16_000, 64_000, 4, 32)
    return head + struct.pack("<4sI", b"data", 3200) + samples.tobytes()


def asked(family: str, source: np.ndarray, lengths: np.ndarray) -> dict:
    """The arguments by which transformers takes these sources."""
    if family == "whisper":
        return {"input_features": torch.tensor(source).transpose(1, 2)}
    mask = np.arange(source.shape[1]) < lengths[:, None]
    return {"input_ids": torch.tensor(source), "attention_mask": torch.tensor(mask.astype(np.int64))}


def tokens(count: int, length: int = 17, seed: int = 1) -> np.ndarray:
    """[count, length] token ids for the decoder."""
    return np.random.default_rng(seed).integers(2, 90, (count, length))


def torch_logits(model, source, lengths, ids) -> tuple[np.ndarray, np.ndarray]:
    """(the encoder's output [B, S, D], logits [B, T, V])."""
    family = model.config.model_type
    with torch.no_grad():
        out = model(**asked(family, source, lengths), decoder_input_ids=torch.tensor(ids))
    return out.encoder_last_hidden_state.numpy(), out.logits.numpy()
