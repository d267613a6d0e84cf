"""Metrics of a request's timeline, and of all those of a run, by the definitions of `vllm bench serve`.

An event is a server-sent event with choices; it may hold several tokens, and the first one counts as the
first token whatever its text is.

  TTFT   first event - sending
  ITL    gap between an event and the one before
  E2EL   last event - sending
  TPOT   (E2EL - TTFT) / (output tokens - 1); none where there is one token
  queue  sending - arrival: waiting for the client's own `max_concurrency`; in no other number

Latencies are those of completed requests only. Since a server that drops slow requests would look faster,
failed ones are counted and shown beside them. Unlike vLLM's client, ours also fails a request whose stream
breaks off, reports an error, or has a different number of tokens than was asked for.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

_FIELD = {"ttft": "ttft", "tpot": "tpot", "e2el": "latency"}  # of a timeline, by a goal's name
METRICS = ("ttft", "tpot", "itl", "e2el")
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """One request. Moments are in seconds of one monotonic clock.

    Attributes:
      due: when it arrived. sent: when it was sent. events: moments of the events with choices.
      prompt_tokens, output_tokens: as the server counted them. error: why it failed, "" if it did not.
    """

    due: float
    sent: float
    events: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.events[0] - self.sent if self.events else 0.0

    @property
    def itl(self) -> list[float]:
        return np.diff(self.events).tolist()

    @property
    def latency(self) -> float:
        return self.events[-1] - self.sent if self.events else 0.0

    @property
    def tpot(self) -> float:
        """Time per output token; 0 if there is no second token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def queued(self) -> float:
        return self.sent - self.due


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the start at which `count` requests arrive, `rate` a second.

    Gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, smaller values come in bursts,
    larger ones are more even, infinity has equal gaps. They are scaled so that the last request arrives
    exactly at count / rate, whatever the seed. At an infinite rate all arrive at 0.
    """
    if np.isinf(rate):
        return [0.0] * count
    if np.isinf(burstiness):
        gaps = np.full(count, 1 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    moments = np.cumsum(gaps)
    return (moments * (count / rate / moments[-1])).tolist()


def summary(
    timelines: Sequence[Timeline],
    duration: float,
    percentiles: Sequence[float] = (99,),
    goals: Mapping[str, float] | None = None,
) -> dict:
    """A run under vLLM's JSON keys; latencies in ms, the details of each request in seconds.

    Args:
      duration: seconds from the start of sending to the last completion.
      goals: most ms of "ttft", "tpot" or "e2el"; a request is good if it keeps all of them.
    """
    done = [t for t in timelines if not t.error]
    tokens_in, tokens_out = (sum(getattr(t, n) for t in done) for n in ("prompt_tokens", "output_tokens"))
    # One that ends as another begins does not overlap it.
    changes = sorted([(t.sent, 1) for t in done] + [(t.sent + t.latency, -1) for t in done])
    good = sum(all(1e3 * getattr(t, _FIELD[n]) <= most for n, most in (goals or {}).items()) for t in done)
    most_at_once = int(max(np.cumsum([change for _, change in changes]), default=0))
    out = {"duration": duration, "completed": len(done), "failed": len(timelines) - len(done)}
    out |= {"total_input_tokens": tokens_in, "total_output_tokens": tokens_out}
    out |= {"request_throughput": len(done) / duration, "output_throughput": tokens_out / duration}
    out |= {"request_goodput": good / duration if goals else None}
    out |= {"total_token_throughput": (tokens_in + tokens_out) / duration}
    out |= {"max_output_tokens_per_s": _busiest_second(done), "max_concurrent_requests": most_at_once}
    seconds = {"ttft": [t.ttft for t in done], "tpot": [t.tpot for t in done if t.output_tokens > 1]}
    seconds |= {"itl": [gap for t in done for gap in t.itl], "e2el": [t.latency for t in done]}
    seconds |= {"client_queue_time": [t.queued for t in done]}
    seconds |= {"e2el_including_client_queue": [t.queued + t.latency for t in done]}
    for name, values in seconds.items():  # zeros if there are none
        ms = 1e3 * np.asarray(values or [0.0])
        averages = (("mean", np.mean), ("median", np.median), ("std", np.std))
        out |= {f"{word}_{name}_ms": float(average(ms)) for word, average in averages}
        out |= {f"p{p:g}_{name}_ms": float(np.percentile(ms, p)) for p in percentiles}
    # Of every request, failed ones too, in the order of their arrival.
    rows = [(t.prompt_tokens, 0 if t.error else t.output_tokens, t.ttft, t.itl, t.latency) for t in timelines]
    rows = [(*row, t.sent, t.queued, t.error) for row, t in zip(rows, timelines, strict=True)]
    return out | {name: [row[i] for row in rows] for i, name in enumerate(DETAILS)}


def _busiest_second(done: Sequence[Timeline]) -> float:
    """Most tokens in one second, counted from the first sending; an event counts the mean tokens per
    event."""
    if not done:
        return 0.0
    first = min(t.sent for t in done)
    moments = np.concatenate([np.asarray(t.events) for t in done]) - first
    tokens = np.concatenate([np.full(len(t.events), t.output_tokens / len(t.events)) for t in done])
    return float(np.bincount(moments.astype(int), tokens).max())
