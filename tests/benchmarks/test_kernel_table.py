"""`benchmarks.kernels`: its arithmetic by hand, a table of one case, and what is written without a device."""

import dataclasses
import json

import jax
import pytest

from benchmarks import kernels
from benchmarks.common import write
from swiftkv_jax.kernels.fused_kv_fill import cases as fill_cases
from swiftkv_jax.kernels.k_cache_attention import cases as k_cache_cases
from swiftkv_jax.kernels.paged_attention import cases as paged_cases

MIB = 2**20


def run(monkeypatch, folder, *flags: str) -> int:
    monkeypatch.setattr("sys.argv", ["kernels", "--output", str(folder), "--rounds", "1", *flags])
    return kernels.main()


def test_the_least_work_of_a_case_by_hand():
    """Llama-3.1-8B reads 64 x 8192 tokens of 2 x 1024 numbers; Llama-2-7B half a cache, and W_KV."""
    paged = paged_cases.REAL["llama_8b"]
    assert (paged.flops, paged.bytes) == (64 * 8192 * 32 * 4 * 128, 64 * 8192 * 2 * 1024 * 2)
    window = dataclasses.replace(paged, window=100, queries=3)
    assert window.flops == 64 * 300 * 32 * 4 * 128
    assert dataclasses.replace(paged, lengths=(5,), queries=3).flops == (3 + 4 + 5) * 32 * 4 * 128
    assert window.bytes == 64 * 102 * 2 * 1024 * 2
    scaled = dataclasses.replace(paged, stored="int8")
    assert scaled.bytes == 64 * 8192 * 8 * (2 * 128 + 8)
    assert k_cache_cases.REAL["llama2_7b"].bytes == 16 * 8192 * 4096 * 2 + 32 * MIB
    fill = fill_cases.REAL["llama_8b"]
    assert fill.flops == 2 * 8192 * 4096 * 16 * 2048
    assert fill.bytes == 2 * (8192 * 4096 + 16 * 2048 * 4096 + 8192 * 16 * 2048)


def test_a_table_of_one_case(monkeypatch, tmp_path):
    assert (
        run(monkeypatch, tmp_path, "--platform", "cpu", "--kernel", "paged_attention", "--case", "gqa4") == 0
    )
    result = json.loads((tmp_path / "kernels_cpu_paged_attention_gqa4.json").read_text())
    [case] = result["cases"]
    work = paged_cases.SMALL["gqa4"]
    assert (case["flops"], case["bytes"]) == (work.flops, work.bytes)
    top = result["ceilings"]
    assert case["floor"] == pytest.approx(max(work.flops / top["flops"], work.bytes / top["bytes"]))
    seconds = case["seconds"]
    assert {"xla", "jax.nn xla, contiguous"} <= {name for name, s in seconds.items() if isinstance(s, float)}
    others = {"pallas_tpu", "pallas_gpu", "cuDNN, pages", "torch SDPA", "torch FlexAttention"}
    assert others <= {name for name, s in seconds.items() if isinstance(s, str)}
    table = (tmp_path / "kernels_cpu_paged_attention_gqa4.md").read_text()
    ms, share = 1e3 * seconds["xla"], 100 * case["floor"] / seconds["xla"]
    assert f"| paged_attention | gqa4 | xla | {ms:.3f} |" in table and f"| {share:.1f} % |" in table
    assert "| pallas_gpu | not run: paged_attention: pallas_gpu needs a gpu, this is cpu" in table


def test_when_its_time_is_up_no_case_begins_and_all_are_named(monkeypatch, tmp_path):
    flags = "--platform", "cpu", "--kernel", "paged_attention", "--minutes", "0"
    assert run(monkeypatch, tmp_path, *flags) == 0
    result = json.loads((tmp_path / "kernels_cpu_paged_attention.json").read_text())
    assert not result["cases"]
    assert result["no_time_for"] == [f"paged_attention {name}" for name in paged_cases.SMALL]
    text = (tmp_path / "kernels_cpu_paged_attention.md").read_text()
    assert f"No time was left for: paged_attention {next(iter(paged_cases.SMALL))}, " in text


def test_without_a_device_it_says_not_measured_and_keeps_what_was(monkeypatch, tmp_path, capsys):
    def devices(platform):
        raise RuntimeError(f"no {platform}")

    monkeypatch.setattr(jax, "devices", devices)
    for _ in range(2):
        assert run(monkeypatch, tmp_path, "--platform", "gpu") == 1
        assert json.loads((tmp_path / "kernels_gpu.json").read_text()) == {"measured": False}
        assert "Not measured: no gpu was available" in (tmp_path / "kernels_gpu.md").read_text()
        assert "says not measured" in capsys.readouterr().out
    write("kernels_gpu", {"cases": [1]}, "a table", tmp_path)
    assert run(monkeypatch, tmp_path, "--platform", "gpu") == 1
    assert json.loads((tmp_path / "kernels_gpu.json").read_text()) == {"cases": [1]}
    assert (tmp_path / "kernels_gpu.md").read_text() == "a table"
    assert "keeps what was measured before" in capsys.readouterr().out
