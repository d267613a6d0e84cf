"""`/metrics`: vLLM's names are all there, and what they count is what was streamed."""

import re
import time

import jax
import numpy as np
import pytest
import tiny_engine as tiny
from http_server import SIZES, Running, make_llm, model, wait_for

from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core.predict import Predicted, identity
from swiftkv_jax.engine.llm import LLM

WARM_UP = True


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled():
    """Before the server starts, or programs of other modules could hide that its warm-up lacks one."""
    jax.clear_caches()


NAMES = (  # vLLM's, and what SwiftKV adds; a counter's name gets _total, a histogram's among others _count
    "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total "
    "prefix_cache_hits_total prompt_tokens_total generation_tokens_total request_success_total "
    "num_preemptions_total time_to_first_token_seconds_count inter_token_latency_seconds_count "
    "request_time_per_output_token_seconds_count e2e_request_latency_seconds_count "
    "request_queue_time_seconds_count request_prefill_time_seconds_count request_decode_time_seconds_count "
    "request_inference_time_seconds_count request_prompt_tokens_count request_generation_tokens_count "
    "request_params_max_tokens_count request_params_n_count iteration_tokens_total_count cache_config_info "
    "corrupted_requests_total admission_rejections_total prefill_tokens_skipped_total kv_bytes "
    "auxiliary_prompt_tokens_total compilations_total log_lines_dropped_total kernels_info"
).split()
PROTOCOL = {  # what an endpoint picker reads of a server that speaks as vLLM does (Gateway API inference
    # extension, proposal 003, model server protocol): name, type, and labels whose values it reads
    "vllm:num_requests_waiting": ("gauge", {}),
    "vllm:num_requests_running": ("gauge", {}),
    "vllm:kv_cache_usage_perc": ("gauge", {}),
    "vllm:cache_config_info": ("gauge", {"block_size": "8", "num_gpu_blocks": "64"}),
}
LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.M)


def read(server: Running) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Every sample by its name: its labels and its value."""
    out: dict[str, list] = {}
    for name, labels, number in LINE.findall(server.metrics()):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        out.setdefault(name.removeprefix("swiftkv_"), []).append((pairs, float(number)))
    return out


def value(server: Running, name: str) -> float:
    [(_, found)] = read(server)[name]
    return found


def test_the_first_request_compiles_nothing(served):
    before = value(served, "compilations_total")
    assert before
    served.complete("x", max_tokens=2)
    assert value(served, "compilations_total") == before


def test_vllms_names_are_there_with_its_labels(served):
    found = read(served)
    assert not set(NAMES) - set(found)
    ours = [labels for name in NAMES for labels, _ in found[name]]
    assert all(labels["model_name"] == "tiny" for labels in ours if "model_name" in labels)
    assert {labels["finished_reason"] for labels, _ in found["request_success_total"]} >= {"stop", "length"}
    wait_for(lambda: value(served, "kv_bytes") == served.engine.runner.cache.nbytes > 0)


def gaps(server: Running) -> tuple[float, float]:
    name = "inter_token_latency_seconds"
    return value(server, f"{name}_count"), value(server, f"{name}_sum")


@pytest.mark.parametrize("n, tokens", [(1, 1), (1, 2), (1, 23), (3, 14)])
def test_gaps_between_tokens_follow_the_stream(served, n, tokens):
    """A gap for every token after a completion's first; together they last from first to last token."""
    count, seconds = gaps(served)
    decoding = value(served, "request_decode_time_seconds_sum")
    body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "n": n, "seed": 1}
    began = time.perf_counter()
    events = served.events(**body, stream_options={"include_usage": True})
    took = time.perf_counter() - began
    assert events[-2]["usage"]["completion_tokens"] == n * tokens
    wait_for(served.idle)
    wait_for(lambda: gaps(served)[0] - count == n * (tokens - 1))
    passed = gaps(served)[1] - seconds
    assert passed == pytest.approx(value(served, "request_decode_time_seconds_sum") - decoding, abs=1e-6)
    assert (0 < passed < n * took) if tokens > 1 else passed == 0


def test_counters_count_what_was_asked_and_answered(served):
    """A prompt of 20 tokens in pages of 8, twice: the second completion finds two pages of the first.

    Of two layers a prompt's tokens run one, but for the last of each.
    """
    names = (
        "prompt_tokens_total generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total "
        "request_prompt_tokens_sum request_generation_tokens_sum request_params_n_sum request_params_n_count "
        "request_params_max_tokens_sum time_to_first_token_seconds_count e2e_request_latency_seconds_count "
        "corrupted_requests_total prefill_tokens_skipped_total"
    ).split()

    def now() -> dict[str, float]:
        found = {name: value(served, name) for name in names}
        ended = {labels["finished_reason"]: count for labels, count in read(served)["request_success_total"]}
        return found | ended

    before = now()
    served.complete("counted once, twice.", max_tokens=5, n=2, ignore_eos=True, cache_salt="counters")
    want = (24, 10, 40, 16, 20, 10, 2, 1, 5, 2, 2, 0, 22)
    want = dict(zip(names, want, strict=True)) | {"length": 2, "stop": 0, "abort": 0, "error": 0}
    wait_for(lambda: {name: count - before[name] for name, count in now().items()} == want)


def test_prompt_tokens_that_an_auxiliary_read_ran_no_layer_of_the_model():
    """Of 20 tokens the auxiliary reads 17. Of the last three, the model's own, two run one of two layers."""
    net, params = model()
    pair = Predicted(net, net, Prediction.nearest(2, (0, 1), tail=3))
    parts = {"base": params, "auxiliary": params, "predictor": identity(pair)}
    llm = LLM.from_model(pair, parts, tiny.Bytes(), **SIZES)
    with Running(llm, warm_up=False) as server:
        server.complete("counted once, twice.", max_tokens=2)
        wait_for(server.idle)
        names = ("prompt_tokens_total", "auxiliary_prompt_tokens_total", "prefill_tokens_skipped_total")
        wait_for(lambda: [value(server, name) for name in names] == [20, 17, 17 * 2 + 2 * 1])


def test_prompt_tokens_before_a_tail_skip_the_later_layers():
    """17 of 20 tokens skip two of four layers."""
    llm = LLM.from_model(*tiny.make_model(KVPlan.swiftkv(4, 2, tail=3)), tiny.Bytes(), **SIZES)
    with Running(llm, warm_up=False) as server:
        server.complete("counted once, twice.", max_tokens=2)
        wait_for(lambda: value(server, "prefill_tokens_skipped_total") == 17 * 2)


def test_under_vllms_prefix_an_endpoint_picker_finds_what_its_protocol_lists():
    with Running(make_llm(page_size=8, num_pages=64), warm_up=False, metrics_prefix="vllm:") as server:
        text = server.http.get("/metrics").text
    assert "swiftkv_" not in text
    for name, (kind, labels) in PROTOCOL.items():
        assert f"# TYPE {name} {kind}\n" in text
        [(found, number)] = re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.M)  # one: it takes any of several
        assert labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', found)).items()
        assert float(number) == (1.0 if name.endswith("_info") else 0.0)


def test_a_stopped_server_removes_its_jax_listeners():
    with Running(make_llm(), warm_up=False) as server:
        metrics = server.api.metrics
        before = metrics.compilations
        jax.jit(lambda x: x + 1)(np.zeros(3))
        assert metrics.compilations > before
    before = metrics.compilations
    jax.jit(lambda x: x + 2)(np.zeros(3))
    assert metrics.compilations == before
