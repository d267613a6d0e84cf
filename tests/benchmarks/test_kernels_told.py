"""The JSON of a benchmark names the kernels that its engines ran."""

import pytest
from tiny_models import PLAIN, tiny

from benchmarks import latency, whisper
from swiftkv_jax.config.plan import KVPlan


def counted(runs, rounds: int) -> dict[object, list[float]]:
    """Times without a measurement: one second for the first run, two for the second, and so on."""
    return {name: [float(place + 1)] * rounds for place, name in enumerate(runs)}


def test_engine_latency_records_the_kernels_of_each_engine(monkeypatch):
    monkeypatch.setattr(latency, "in_rounds", counted)
    standard = latency.Contender("standard", *tiny(PLAIN, KVPlan.standard(4)))
    student = latency.Contender("student", *tiny(PLAIN, KVPlan.swiftkv(4, 2)))
    whole = latency.Contender("full_depth", standard.model, standard.params, full_depth=True)
    found = latency.through_engines([whole, standard, student], 8, 1, outputs=2)
    assert list(found["ttft"]) == ["full_depth", "standard", "student"]
    assert list(found["kernels"]) == ["standard", "student"], "no engine runs every layer"
    assert all(names["decode"] and names["how"] for names in found["kernels"].values())


@pytest.mark.slow
def test_whispers_times_name_the_kernels_of_each_form(monkeypatch):
    monkeypatch.setattr(whisper, "interleaved", counted)
    found = whisper.measured(whisper.Size(1, 64, 1, 0.0, 0.0), 1)
    assert list(found) == list(whisper.FORMS)
    assert all(row["kernels"]["how"] for row in found.values())
