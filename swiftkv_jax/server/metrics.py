"""The metrics of `/metrics`, with vLLM's names behind our prefix. No label ever comes from a request."""

import bisect
import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import jax
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from swiftkv_jax.engine.engine import Engine, Group, Stats
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.sequence import Sequence
from swiftkv_jax.server import logs
from swiftkv_jax.server.admission import Load
from swiftkv_jax.server.settings import HttpSettings

_LATENCY = tuple(
    map(float, "0.001 0.005 0.02 0.1 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 60 120 480 1920 7680".split())
)
_PER_TOKEN = tuple(
    map(float, "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 1 2.5 10 40 80".split())
)
_SIZES = tuple(2**i for i in range(18))
_COMPILED = "/jax/core/compile/backend_compile_duration"
_LABELS = ("model_name", "engine")
REASONS = ("stop", "length", "abort", "error")
REFUSALS = ("queue", "key", "draining", "starting")
_COUNTED = {  # metric: (field of Stats, what it counts)
    "prompt_tokens": ("prompt_tokens", "prompt tokens computed; those of cached prefixes are not"),
    "auxiliary_prompt_tokens": ("auxiliary_tokens", "prompt tokens that an auxiliary model computed"),
    "generation_tokens": ("output_tokens", "tokens generated"),
    "num_preemptions": ("preemptions", "sequences preempted: they gave up their pages and began anew"),
    "prefix_cache_queries": ("prefix_queries", "prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hits", "prompt tokens found in the prefix cache"),
    "corrupted_requests": ("failed_requests", "completions that failed, as by non-finite logits"),
}
_TIMES = {  # metric: (times of a `Sequence` that it begins and ends at, what it measures)
    "time_to_first_token_seconds": ("arrival", "first_token", "from arrival to the first token"),
    "e2e_request_latency_seconds": ("arrival", "finished", "from arrival to the last token"),
    "request_queue_time_seconds": ("arrival", "scheduled", "from arrival to its start"),
    "request_prefill_time_seconds": ("scheduled", "first_token", "from its start to the first token"),
    "request_decode_time_seconds": ("first_token", "finished", "from the first token to the last"),
    "request_inference_time_seconds": ("scheduled", "finished", "from its start to the last token"),
}
_COUNTS = {
    "request_prompt_tokens": "tokens of a prompt",
    "request_generation_tokens": "tokens generated for a request",
    "request_params_max_tokens": "max_tokens of a request",
    "request_params_n": "n of a request",
    "iteration_tokens_total": "tokens of one launch of the engine",
}


class Metrics(Collector):
    """One registry, filled by the engine's thread and read by `/metrics`.

    Attributes:
      registry: of all metrics.
      compilations: programs compiled, or read from the compilation cache, since this object was made.
    """

    def __init__(self, llm: LLM, settings: HttpSettings):
        self._names = (settings.model_name, "0")
        self.registry, self._prefix = CollectorRegistry(), settings.metrics_prefix
        self._stats, self._tokens, self.compilations = Stats(), 0, 0
        self._plan = llm.model.plan
        gauges = {
            "num_requests_running": "sequences in the batch",
            "num_requests_waiting": "sequences that wait to run",
            "kv_cache_usage_perc": "share of the cache's pages in use, 0 to 1",
            "kv_bytes": "bytes of the whole cache",
        }
        self._gauges = {name: self._one(Gauge, name, text) for name, text in gauges.items()}
        times = {name: text for name, (*_, text) in _TIMES.items()}
        self._times = {name: self._one(Histogram, name, text, _LATENCY) for name, text in times.items()}
        name, text = "request_time_per_output_token_seconds", "seconds per token after the first"
        self._per_token = self._one(Histogram, name, text, _PER_TOKEN)
        self._sizes = {name: self._one(Histogram, name, text, _SIZES) for name, text in _COUNTS.items()}
        self._gaps = _Gaps()
        text = "finished requests by reason"
        self._ended = self._several("request_success", text, "finished_reason", REASONS)
        self._refused = self._several("admission_rejections", "requests not taken", "reason", REFUSALS)
        sizes = dataclasses.asdict(llm.settings) | {"bytes_per_token": llm.cache_bytes_per_token}
        # In vLLM's words too.
        sizes |= {"block_size": llm.settings.page_size, "num_gpu_blocks": llm.settings.num_pages}
        self._info("cache_config", "the cache", sizes)
        self._info("kernels", "which implementation runs each kind of kernel call", llm.kernels)
        self.registry.register(self)
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _info(self, name: str, text: str, values: dict) -> None:
        info = Info(f"{self._prefix}{name}", text, registry=self.registry)
        info.info({name: str(value) for name, value in values.items()} | {"model_name": self._names[0]})

    def _one(self, kind, name: str, text: str, buckets=None):
        options = {} if buckets is None else {"buckets": buckets}
        metric = kind(f"{self._prefix}{name}", text, _LABELS, registry=self.registry, **options)
        return metric.labels(*self._names)

    def _several(self, name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
        metric = Counter(f"{self._prefix}{name}", text, (*_LABELS, label), registry=self.registry)
        return {value: metric.labels(*self._names, value) for value in values}

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.compilations += event == _COMPILED

    def stepped(self, engine: Engine, load: Load) -> None:
        """Count what the last launch did; on the engine's thread."""
        self._stats = dataclasses.replace(engine.stats)
        self._gauges["num_requests_running"].set(load.running)
        self._gauges["num_requests_waiting"].set(load.queued.sequences)
        self._gauges["kv_cache_usage_perc"].set(load.pages_used / load.pages)
        self._gauges["kv_bytes"].set(engine.stats.cache_bytes)
        tokens = self._stats.prompt_tokens + self._stats.output_tokens
        if tokens > self._tokens:
            self._sizes["iteration_tokens_total"].observe(tokens - self._tokens)
        self._tokens = tokens
        for sequence in engine.scheduler.running.values():
            self._gaps.observe(sequence)

    def finished(self, group: Group) -> None:
        """Count a request that has ended, for any reason; on the engine's thread."""
        params = group.request.params
        self._sizes["request_prompt_tokens"].observe(len(group.request.token_ids))
        self._sizes["request_generation_tokens"].observe(sum(len(s.output) for s in group.sequences))
        self._sizes["request_params_max_tokens"].observe(params.max_tokens or 0)
        self._sizes["request_params_n"].observe(params.n)
        for sequence in group.sequences:
            self._gaps.observe(sequence)
            self._ended[sequence.finish_reason or "error"].inc()
            if not sequence.first_token:
                continue
            for name, (begin, end, _) in _TIMES.items():
                self._times[name].observe(max(0.0, getattr(sequence, end) - getattr(sequence, begin)))
            if len(sequence.output) > 1 and (seconds := sequence.metrics.tpot) is not None:
                self._per_token.observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a refused request, by one of `REFUSALS`; on the event loop's thread too."""
        self._refused[reason].inc()

    def collect(self) -> Iterator[Metric]:
        """For the registry: counters that the engine keeps itself, and the gaps between tokens."""
        stats, plan = self._stats, self._plan
        values = {name: (getattr(stats, field), text) for name, (field, text) in _COUNTED.items()}
        own = stats.prompt_tokens - stats.auxiliary_tokens - stats.prompt_survivors
        skipped = stats.auxiliary_tokens * plan.num_layers + own * plan.skipped_layers
        values["prefill_tokens_skipped"] = skipped, "layers skipped by prompt tokens, summed over tokens"
        values["compilations"] = (self.compilations, "programs compiled; constant once the server is warm")
        values["log_lines_dropped"] = logs.dropped(), "log lines dropped: stderr was not read in time"
        for name, (value, text) in values.items():
            family = CounterMetricFamily(f"{self._prefix}{name}", text, labels=_LABELS)
            family.add_metric(self._names, value)
            yield family
        text = "seconds between a completion's tokens; tokens of one launch share its time"
        gaps = HistogramMetricFamily(f"{self._prefix}inter_token_latency_seconds", text, labels=_LABELS)
        gaps.add_metric(self._names, self._gaps.buckets(), self._gaps.seconds)
        yield gaps


class _Gaps:
    """A histogram of the times between tokens. A launch yields several tokens at once, which are counted
    together: an observation for every token would cost the engine's thread more than its own work on a
    launch.

    Attributes:
      seconds: the sum of all gaps, which is the time from first to last tokens.
    """

    def __init__(self):
        self.seconds = 0.0
        self._counts = [0] * (len(_PER_TOKEN) + 1)
        self._seen: weakref.WeakKeyDictionary[Sequence, tuple[int, float]] = weakref.WeakKeyDictionary()

    def observe(self, sequence: Sequence) -> None:
        """Count the tokens that came since the last call."""
        tokens, now = len(sequence.output), sequence.last_token
        seen, before = self._seen.get(sequence, (1, sequence.first_token))
        if tokens > seen:
            self.seconds += now - before
            self._counts[bisect.bisect_left(_PER_TOKEN, (now - before) / (tokens - seen))] += tokens - seen
        if tokens:
            self._seen[sequence] = (tokens, now)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds with the gaps up to each, as Prometheus expects them."""
        bounds = [*(floatToGoString(bound) for bound in _PER_TOKEN), "+Inf"]
        return list(zip(bounds, map(float, itertools.accumulate(self._counts)), strict=True))


def render(everyone: Iterable[Metrics]) -> bytes:
    """Prometheus' text format. A metric of several models has one name, and labels tell the models apart."""
    families: dict[str, Metric] = {}
    for family in (family for metrics in everyone for family in metrics.registry.collect()):
        known = families.setdefault(family.name, family)
        if known is not family:
            known.samples += family.samples
    together = SimpleNamespace(collect=families.values)
    return generate_latest(together)  # pyright: ignore[reportArgumentType]
