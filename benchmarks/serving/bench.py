"""Points to measure, and the rounds that measure them: all systems in turn, each round begins with
another."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import in_turn, pages_within
from benchmarks.serving import workloads
from benchmarks.serving.client import Ask, run
from benchmarks.serving.servers import Server, found, started
from benchmarks.serving.system import system
from benchmarks.serving.timeline import arrivals, summary
from swiftkv_jax.analysis.flops import cache_bytes_per_token
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class Point:
    """One load. `asks` makes its requests from a seed; `rate` is in requests per second."""

    name: str
    asks: Callable[[int], list[Ask]]
    rate: float = math.inf


class Fleet:
    """The servers of one workload, started when they are first asked for. Used in a `with` block.

    With `alone` only one runs at a time, for devices whose memory holds only one model.
    """

    def __init__(self, args, flags: dict[str, list[str]], say):
        """`flags`: for each system's process; empty for servers that run elsewhere."""
        self._args, self._flags, self._say = args, flags, say
        self._running: dict[str, Server] = {}
        self.described: dict[str, dict] = {}  # the description that each server gave of itself
        self._warm: set[tuple[str, str]] = set()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def ready(self, name: str, point: Point) -> Server:
        """The server, which has answered a few requests of this point."""
        if name not in self._running:
            if self._args.base_url:
                server = found(name, self._args.base_url[name])
            else:
                if self._args.alone:
                    self._stack.close()
                    self._running.clear()
                    self._warm.clear()
                self._say(f"{name}: starting")
                server = self._stack.enter_context(started(name, self._flags[name], self._say))
            self._running[name], self.described[name] = server, server.described
        server = self._running[name]
        if (name, point.name) not in self._warm and self._args.num_warmups:
            first = point.asks(self._args.seed + 999_983)[: self._args.num_warmups]
            run(server.target, first, [0.0] * len(first))
            self._warm.add((name, point.name))
        return server


def measure(args, fleet: Fleet, workload: str, points: Sequence[Point], systems: Sequence[str], say) -> list:
    """All runs of some points: vLLM's keys, plus the workload, point, system and round."""
    runs = []
    for number in range(args.rounds):
        order = in_turn(systems, number)
        pairs = [(p, s) for p in points for s in order]
        if args.alone:
            pairs.sort(key=lambda pair: order.index(pair[1]))
        for point, name in pairs:
            server = fleet.ready(name, point)
            result = one_run(args, server, point, args.seed + number)
            say(
                f"{workload} {point.name}, round {number + 1}, {name}: "
                "{request_throughput:.2f} req/s, {total_token_throughput:,.0f} tokens/s, "
                "TTFT {median_ttft_ms:.1f} ms, TPOT {median_tpot_ms:.2f} ms, failed {failed}".format(**result)
            )
            for error in [e for e in result["errors"] if e][:10]:
                say(f"  {error}")
            runs.append({"workload": workload, "point": point.name, "round": number} | result)
    return runs


def one_run(args, server: Server, point: Point, seed: int) -> dict:
    """One run of one point on one server. The same seed sends the same requests to every server."""
    asks = point.asks(seed)
    delays = arrivals(len(asks), point.rate, args.burstiness, seed)
    before, date = server.compilations(), time.strftime("%Y%m%d-%H%M%S")
    timelines, duration = run(server.target, asks, delays, args.max_concurrency)
    after = server.compilations()
    kind = {"backend": "openai", "endpoint_type": "openai", "label": None}
    about = {"date": date, **kind, "model_id": server.target.model, "tokenizer_id": str(args.model)}
    about |= {"num_prompts": len(asks), "request_rate": "inf" if math.isinf(point.rate) else point.rate}
    about |= {"burstiness": args.burstiness if math.isfinite(args.burstiness) else "inf"}
    about |= {"max_concurrency": args.max_concurrency}
    compiled = None if after is None else after - (before or 0)
    more = {"system": server.name, "seed": seed, "compilations": compiled}
    return about | args.metadata | summary(timelines, duration, args.percentiles, args.goals) | more


def fixed(args, config: ModelConfig) -> tuple[list[Point], int]:
    """A point for every length that fits, and the context they need."""
    outputs, scale = _outputs(args, config), _scale(args, config)
    pairs = [(workloads.scaled(length, scale), outputs) for length in args.lengths]
    pairs = [pair for pair in pairs if sum(pair) <= config.max_position_embeddings]
    if not pairs:
        most = config.max_position_embeddings
        raise UsageError(f"no length of {args.lengths} fits {most} at --scale {scale:g}: raise --scale")
    return [_even(args, config, pair) for pair in pairs], max(map(sum, pairs))


def sharegpt(args, config: ModelConfig) -> tuple[list[Point], int]:
    """A point for every ratio, and the context they need. Lengths are divided only where --scale says so."""
    context, scale = config.max_position_embeddings, args.scale or 1.0

    def point(ratio: float) -> Point:
        def asks(seed: int) -> list[Ask]:
            if args.dataset:
                found_asks = workloads.from_file(args.dataset, args.tokenizer, ratio, context, seed)
                chosen = [ask for ask, _ in zip(found_asks, range(args.num_prompts), strict=False)]
                if not chosen:
                    raise UsageError(f"{args.dataset} has no request of ratio {ratio:g} that fits {context}")
                return chosen
            # Lengths must fit after the division; rounding up may add a token on each side.
            room = int(scale * (context - 2))
            lengths = workloads.like_sharegpt(args.num_prompts, ratio, room, seed)
            small = [(workloads.scaled(n, scale), workloads.scaled(m, scale)) for n, m in lengths]
            return workloads.asks(small, config.vocab_size, seed)

        return Point(f"{ratio:g}", asks)

    return [point(ratio) for ratio in args.ratios], context


def load(args, config: ModelConfig) -> tuple[Point, int]:
    """The one length of rate sweeps and budgets, and the context it needs."""
    pair = (workloads.scaled(args.load, _scale(args, config)), _outputs(args, config))
    if sum(pair) > config.max_position_embeddings:
        raise UsageError(f"--load {args.load} does not fit {config.max_position_embeddings}: raise --scale")
    return _even(args, config, pair), sum(pair)


def rates(point: Point, wanted: Sequence[tuple[float, bool]], saturation: float) -> list[Point]:
    """The point at several request rates; marked ones are in units of the first system's saturation rate."""
    values = [value * saturation if relative else value for value, relative in wanted]
    return [dataclasses.replace(point, name=f"{rate:.4g}", rate=rate) for rate in values]


def budget_pages(args, config: ModelConfig, context: int, share: float, name: str) -> int:
    """Pages of a system's cache that take `share` of a full batch's in the standard model; 0: too few."""

    def per_token(which: str) -> int:
        variant = system(which, config.num_layers, args.share)
        kind = args.dtype if variant.cache_dtype == "auto" else variant.cache_dtype
        return cache_bytes_per_token(config, variant.plan, kind)

    whole = -(-context // args.page_size) * args.page_size  # tokens that a sequence's pages hold
    budget = share * per_token("standard") * args.max_num_seqs * whole
    return pages_within(budget, per_token(name), args.page_size, context)


def server_flags(args, context: int, num_pages: int | None = None) -> list[str]:
    """The command line of one system's process."""
    named = {
        "model": Path(args.model).resolve(),
        "dtype": args.dtype,
        "share": args.share,
        "context": context,
    }
    named |= {"max-num-seqs": args.max_num_seqs, "page-size": args.page_size}
    named |= {} if num_pages is None else {"num-pages": num_pages}
    flags = [part for name, value in named.items() for part in (f"--{name}", str(value))]
    return [*flags, "--no-warm-up"] if args.no_warm_up else flags


def _even(args, config: ModelConfig, pair: tuple[int, int]) -> Point:
    def asks(seed: int) -> list[Ask]:
        own = int(np.random.default_rng((seed, *pair)).integers(2**31))
        return workloads.asks([pair] * args.num_prompts, config.vocab_size, own)

    return Point(f"{pair[0]}:{pair[1]}", asks)


def _scale(args, config: ModelConfig) -> float:
    return args.scale or workloads.default_scale(config.max_position_embeddings)


def _outputs(args, config: ModelConfig) -> int:
    return workloads.scaled(args.output_len, _scale(args, config))
