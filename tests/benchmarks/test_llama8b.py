"""`benchmarks.llama8b` on its tiny shape: every row, and numbers that follow from each other."""

import json
import os

import jax
import pytest

from benchmarks import llama8b
from swiftkv_jax.analysis.flops import cache_bytes_per_token, flops_table


@pytest.mark.slow
def test_a_run_of_the_tiny_shape(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["llama8b", "--shape", "tiny", "--output", str(tmp_path)])
    monkeypatch.setattr(llama8b, "ceilings", lambda *_, **__: {"flops": 2e12, "bytes": 1e10})
    monkeypatch.setattr(llama8b, "peer", lambda *_: {"failed": "torch has no GPU here"})
    assert llama8b.main() == 0
    result = json.loads((tmp_path / "llama8b_tiny.json").read_text())
    shape = llama8b.shapes()["tiny"]
    ((length, rows),) = result["lengths"].items()
    assert list(rows) == ["transformers", "standard", "SwiftKV 50 %", "+ 4-way AcrossKV", "+ fp8"]
    assert rows.pop("transformers") == {"failed": "torch has no GPU here"}
    per_token = flops_table(shape.config, context=int(length))["total"] * 1e9
    for name, row in rows.items():
        assert "failed" not in row, (name, row)
        assert row["normalised_tflops"] == pytest.approx(row["prompt_tokens_per_s"] * per_token / 1e12)
        assert row["matmul_share"] == pytest.approx(row["normalised_tflops"] / 2)
        assert row["gain"] == pytest.approx(row["tokens_per_s"] / rows["standard"]["tokens_per_s"])
        # A whole answer takes at least the reading of its prompt and its decoded steps.
        seconds = row["requests"] * (int(length) + shape.outputs) / row["tokens_per_s"]
        assert seconds > 0.5 * (shape.outputs - 1) * row["tpot_ms"] / 1e3
    text = (tmp_path / "llama8b_tiny.md").read_text()
    assert "not run: torch has no GPU here" in text and "| + fp8, 3 at once |" in text
    assert text == capsys.readouterr().out[-len(text) - 1 : -1]


def test_a_row_whose_measuring_fails_loses_no_other(monkeypatch):
    def measure(shape, variant, *_):
        if variant.name == "SwiftKV 50 %":
            raise MemoryError("out of memory\nand much more")
        return {"requests": 1, "tokens_per_s": {"standard": 10.0}.get(variant.name, 15.0)}

    monkeypatch.setattr(llama8b, "ceilings", lambda *_, **__: {"flops": 2e12, "bytes": 1e10})
    monkeypatch.setattr(llama8b, "peer", lambda *_: {"requests": 1, "tokens_per_s": 5.0})
    monkeypatch.setattr(llama8b, "measure", measure)
    result = llama8b.run("tiny", llama8b.shapes()["tiny"], [24], 1.0)
    rows = result["lengths"]["24"]
    assert {name: row.get("gain") for name, row in rows.items()} == {
        "transformers": 0.5,
        "standard": 1.0,
        "SwiftKV 50 %": None,
        "+ 4-way AcrossKV": 1.5,
        "+ fp8": 1.5,
    }
    assert "| SwiftKV 50 % | not run: out of memory |" in llama8b.report(result)


def test_a_decoded_token_reads_a_shared_row_once_a_layer():
    shape = llama8b.shapes()["tiny"]
    for variant in llama8b.variants(shape.config.num_layers)[:3]:
        llm = llama8b.load(shape, variant, 32, 1)
        standard = cache_bytes_per_token(shape.config)
        assert llama8b.read_bytes(llm) == standard
        assert {leaf.dtype.name for leaf in jax.tree.leaves(llm.params)} == {"bfloat16"}


def test_the_real_shape_is_the_8b_model():
    shape = llama8b.shapes()["llama8b"]
    assert shape.lengths == (2048, 8192, 32768) and shape.outputs == 256
    assert [shape.requests(n) for n in (2048, 8192, 32768, 16384)] == [32, 16, 4, 8]
    from swiftkv_jax import params

    tree = params.weights(shape.config, llama8b.variants(32)[0].plan)
    assert params.count(tree) == 8_030_261_248  # of the published checkpoint


@pytest.mark.slow
def test_the_peer_runs_the_same_shape():
    row = llama8b.theirs(llama8b.shapes()["tiny"], 24, "cpu", compiled=False)
    assert row["requests"] == 3 and row["tokens_per_s"] > 0


def test_without_an_accelerator_it_says_not_measured(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.setattr("sys.argv", ["llama8b", "--output", str(tmp_path)])
    assert llama8b.main() == 1
    assert json.loads((tmp_path / "llama8b.json").read_text()) == {"measured": False}
    assert "Not measured" in (tmp_path / "llama8b.md").read_text()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"  # the peer finds the device's memory free


@pytest.mark.parametrize("bad", [["--lengths", "0"], ["--minutes", "0"], ["--shape", "70b"]])
def test_bad_usage(bad, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["llama8b", *bad])
    with pytest.raises(SystemExit) as raised:
        llama8b.main()
    assert raised.value.code == 2
