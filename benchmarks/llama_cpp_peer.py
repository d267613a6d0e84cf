"""llama.cpp as a peer: a Llama-shaped model written as GGUF in float32, and greedy batches through its C API.

Needs `pip install '.[peers]'`. GGUF's names and keys are those of llama.cpp's `llama` architecture.
"""

import ctypes
from pathlib import Path

import numpy as np

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_STEP = 2048  # tokens of one llama_decode
_FLOAT32 = 0  # GGML_TYPE_F32


def write_gguf(model, path: Path) -> None:
    """A transformers Llama model without biases or rope scaling as a GGUF file, with no tokenizer."""
    config, heads = model.config, {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    if config.model_type != "llama":
        raise ValueError(f"only Llama models are written as GGUF here, not {config.model_type!r}")
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "llama")
    sizes = {"vocab_size": config.vocab_size, "context_length": config.max_position_embeddings}
    sizes |= {"embedding_length": config.hidden_size, "block_count": config.num_hidden_layers}
    sizes |= {"feed_forward_length": config.intermediate_size, "head_count": config.num_attention_heads}
    sizes |= dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), config.head_dim)
    sizes |= {"head_count_kv": config.num_key_value_heads, "layer_norm_rms_eps": config.rms_norm_eps}
    sizes |= {"tokenizer_model": "none", "rope_freq_base": config.rope_parameters["rope_theta"]}
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, stem = tensor.float().numpy(), name.removesuffix(".weight")
        if stem in _WHOLE:
            writer.add_tensor(f"{_WHOLE[stem]}.weight", values)
            continue
        _, _, layer, part = stem.split(".", 3)
        if (last := part.split(".")[-1]) in heads:
            values = _interleaved(values, getattr(config, heads[last]))
        writer.add_tensor(f"blk.{layer}.{_LAYER[part]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(kernel: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection [heads * width, in] for rotary pairs that lie side by side, not in two halves."""
    halves = kernel.reshape(heads, 2, -1, kernel.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(kernel.shape)


class LlamaCpp:
    """A loaded GGUF model that decodes up to `sequences` sequences at once, with keys and values in
    float32."""

    def __init__(self, path: Path, sequences: int, context: int, threads: int):
        """`context` is the context length of all sequences together."""
        import llama_cpp

        self.api = llama_cpp
        llama_cpp.llama_log_set(_SILENT, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max, params.kv_unified = context, _STEP, sequences, True
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _FLOAT32
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(_STEP, 0, 1)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab = llama_cpp.llama_vocab_n_tokens(vocab)

    def generate(self, prompts: list[list[int]], outputs: int) -> list[list[int]]:
        """The greedy tokens after each prompt, all prompts together."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self._context), False)
        given: list[list[int]] = [[] for _ in prompts]
        pending = [(s, i, token, i == len(p) - 1) for s, p in enumerate(prompts) for i, token in enumerate(p)]
        for number in range(outputs):
            for start in range(0, len(pending), _STEP):
                for s, token in self._run(pending[start : start + _STEP]):
                    given[s].append(token)
            pending = [(s, len(p) + number, given[s][-1], True) for s, p in enumerate(prompts)]
        return given

    def _run(self, tokens: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """One call: (sequence, position, id, whether to sample) in, (sequence, likeliest id) out."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (sequence, position, token, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if code := self.api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens returned {code}")
        wanted = [(i, sequence) for i, (sequence, _, _, sampled) in enumerate(tokens) if sampled]
        logits = (self.api.llama_get_logits_ith(self._context, i) for i, _ in wanted)
        arrays = (np.ctypeslib.as_array(pointer, (self._vocab,)) for pointer in logits)
        return [(sequence, int(a.argmax())) for (_, sequence), a in zip(wanted, arrays, strict=True)]


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _SILENT(level, text, data):
    """Discard llama.cpp's log."""
