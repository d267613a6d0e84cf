"""The systems in benchmarks.peers give transformers' greedy tokens."""

import numpy as np
import pytest

from benchmarks.llama_cpp_peer import LlamaCpp, write_gguf
from benchmarks.peers import by_transformers, in_batches

PROMPTS = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (9, 1, 30, 17, 2)]


def peer(tied: bool):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_batches_of_similar_lengths_are_put_back_in_order(batch):
    model = peer(tied=True)
    alone = [by_transformers(model, [prompt], 4)[0] for prompt in PROMPTS]
    assert (
        in_batches(lambda prompts, outputs: by_transformers(model, prompts, outputs), batch, PROMPTS, 4)
        == alone
    )


@pytest.mark.parametrize("tied", [True, False])
def test_llama_cpp_on_the_written_file_gives_the_same_tokens(tied, tmp_path):
    for name in ("llama_cpp", "gguf"):
        pytest.importorskip(name, reason=f"needs {name}: pip install '.[peers]'")
    model = peer(tied)
    write_gguf(model, tmp_path / "model.gguf")
    llama = LlamaCpp(tmp_path / "model.gguf", len(PROMPTS), sum(map(len, PROMPTS)) + 8 * len(PROMPTS), 2)
    want = [by_transformers(model, [prompt], 8)[0] for prompt in PROMPTS]
    assert llama.generate(PROMPTS, 8) == want
    assert in_batches(llama.generate, 2, PROMPTS, 8) == want


def test_a_model_that_gguf_is_not_written_for_says_so(tmp_path):
    model = peer(tied=True)
    model.config.model_type = "qwen3"
    with pytest.raises(ValueError, match="not 'qwen3'"):
        write_gguf(model, tmp_path / "model.gguf")
