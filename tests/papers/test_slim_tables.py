"""The Slim attention paper's tables against what it prints, and its closed forms."""

import pytest
from tiny_models import sized

import swiftkv_jax as skv
from benchmarks.papers import slim_tables
from benchmarks.papers.slim_tables import agrees, decoding, intensity, numbers_per_token


@pytest.mark.parametrize("row", slim_tables.TABLE_1, ids=lambda row: row.name)
def test_table_1_equals_the_papers(row):
    """2 h d_k layers context (page 2), and keys alone are half of it."""
    kv, k = (numbers_per_token(row, form) for form in ("kv", "k"))
    assert kv == 2 * k == 2 * row.heads * row.width * row.layers
    assert agrees(kv * row.tokens, row.printed)


@pytest.mark.parametrize("d, h, n", [(4096, 32, 16384), (2048, 32, 100), (1280, 20, 448)])
def test_table_2(d, h, n):
    """The closed forms are for square weights; inputs alone read as much and multiply twice as often."""
    found = decoding(d, h, n)
    assert found["kv"] == (8 * d * d, 4 * d * d, 4 * n * d, 2 * n * d)
    assert found["k, values first"] == ((2 * n + 6) * d * d, 4 * d * d, 4 * n * d, n * d)
    assert found["k"] == (8 * d * d, 4 * d * d, 2 * n * d * (h + 1), n * d)
    assert found["x"] == (8 * d * d, 4 * d * d, 4 * n * d * h, n * d)
    assert found["kv"].intensities() == (2, 2)
    assert found["k, values first"].intensities() == ((n + 3) / 2, 4)
    assert found["k"].intensities() == (2, 2 * h + 2)


@pytest.mark.parametrize("chip", slim_tables.CHIPS.values(), ids=slim_tables.CHIPS)
def test_table_3(chip):
    tops, bandwidth, printed = chip
    assert intensity(tops * 1e12, bandwidth * 1e9) == printed


def test_cache_sizes_equal_section_5_of_the_paper():
    """The aspect ratio r = e / d; the cache is 2 times smaller for keys, 2 r times for inputs."""
    for row, ratio in zip(slim_tables.WIDE, (4 / 3, 4, 16), strict=True):
        kv, k, x = (numbers_per_token(row, form) for form in ("kv", "k", "x"))
        assert (kv / k, kv / x) == (2, pytest.approx(2 * ratio))


@pytest.mark.parametrize("head_dim, ratio", [(128, 1), (256, 2)], ids=["square", "wide"])
def test_flops_and_bytes_know_forms(head_dim, ratio):
    """W_KV has e^2 numbers where W_V has d e: r times as many (section 5). Attention of prompts stays."""
    config = sized(100, 4096, 1, 2, 32, 32, head_dim)
    plan, e = skv.KVPlan.standard(2), 32 * head_dim
    kv, k, x = (skv.flops_table(config, plan.stored_as(form), 1000) for form in ("kv", "k", "x"))
    assert kv["kv"] == x["kv"] == 2 * 2 * 2 * 4096 * e / 1e9
    assert k["kv"] == 2 * (2 * 4096 * e + 2 * e * e) / 1e9 == pytest.approx(kv["kv"] * (1 + ratio) / 2)
    assert {name: k[name] for name in ("qo", "attention")} == {name: kv[name] for name in ("qo", "attention")}
    sizes = [
        [skv.cache_bytes_per_token(config, plan.stored_as(form), dtype) for form in ("kv", "k", "v", "x")]
        for dtype in ("bfloat16", "int8")
    ]
    assert sizes[0] == [2 * 2 * e * 2, 2 * e * 2, 2 * e * 2, 2 * 4096 * 2]
    assert sizes[1] == [2 * 2 * (e + 32 * 4), 2 * (e + 4), 2 * (e + 4), 2 * (4096 + 4)]
