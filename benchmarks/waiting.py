"""The wait of a new request while others decode, by `steps_per_launch`, and the cost of each value to them.

    python -m benchmarks.waiting [--steps 1 2 4 8 16 32] [--rounds 5]

There is one engine for each value, all on the same weights, run in turn. In each, all lanes but one decode
without end. A short prompt arrives at a random moment: its time to first token consists of its own step and
the wait. Then nothing arrives for a while, and the others' rate is measured.
"""

import argparse
import dataclasses
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np

import swiftkv_jax as skv
from benchmarks.common import RESULTS, command, headline, in_turn, machine, table, write
from swiftkv_jax.common.checks import above, integer
from swiftkv_jax.common.errors import exit_code
from swiftkv_jax.engine.request import Request

ONE = skv.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Busy:
    """An engine in which all lanes but one decode; a request at the end of the context is started again."""

    def __init__(self, model, params, steps: int, args):
        settings = {"max_num_seqs": args.max_num_seqs, "max_model_len": args.context}
        self.llm = skv.LLM.from_model(
            model, params, steps_per_launch=steps, prefix_caching=False, cache_dtype="bfloat16", **settings
        )
        self.vocab, self.prompt = model.config.vocab_size, args.prompt
        self.random, self.source = np.random.default_rng(0), random.Random(0)
        self.endless = dataclasses.replace(ONE, max_tokens=args.context - args.prompt)
        self.fill(args.max_num_seqs - 1)
        while self.llm.engine.scheduler.reading:
            self.step()
        self.wait()  # compiles
        self.decode(0.2)

    def fill(self, lanes: int) -> None:
        for _ in range(lanes):
            self.llm.engine.add(self.request(self.endless))

    def request(self, params: skv.SamplingParams) -> Request:
        return self.llm.request(self.random.integers(2, self.vocab, self.prompt).tolist(), params)

    def step(self) -> set[str]:
        """Run a step; returns the ids of the requests that ended."""
        return {group.request.request_id for group in self.llm.engine.step() if group.finished}

    def wait(self) -> float:
        """Seconds from the arrival of a prompt, at a random moment, to its first token."""
        arrival = time.perf_counter() + self.source.uniform(0.0, 0.1)
        while time.perf_counter() < arrival:
            self.fill(len(self.step()))
        request = self.request(ONE)
        self.llm.engine.add(request)
        while request.request_id not in (ended := self.step()):
            self.fill(len(ended))
        return time.perf_counter() - arrival

    def decode(self, seconds: float) -> float:
        """Output tokens per second while nothing arrives."""
        stats = self.llm.engine.stats
        before, began = stats.output_tokens, time.perf_counter()
        while time.perf_counter() < began + seconds:
            self.fill(len(self.step()))
        return (stats.output_tokens - before) / (time.perf_counter() - began)


def measure(model, params, args) -> dict:
    engines = {steps: Busy(model, params, steps, args) for steps in args.steps}
    waits: dict[int, list[float]] = {steps: [] for steps in engines}
    rates: dict[int, list[float]] = {steps: [] for steps in engines}
    for number in range(args.rounds):
        for steps in in_turn(engines, number):
            waits[steps] += [engines[steps].wait() for _ in range(args.arrivals)]
            rates[steps].append(engines[steps].decode(args.seconds))
    by_steps = {}
    for steps in engines:
        wait, rate = waits[steps], statistics.median(rates[steps])
        ttft = {"ttft_ms": statistics.median(wait), "ttft_p95_ms": statistics.quantiles(wait, n=20)[-1]}
        by_steps[str(steps)] = {name: 1e3 * seconds for name, seconds in ttft.items()}
        by_steps[str(steps)] |= {
            "steps_ms": 1e3 * steps * (args.max_num_seqs - 1) / rate,
            "tokens_per_s": rate,
        }
    return {"kernels": next(iter(engines.values())).llm.kernels, "steps": by_steps}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", default="demo/teacher")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    for name, value in (("max-num-seqs", 16), ("context", 1024), ("rounds", 5)):
        p.add_argument(f"--{name}", type=int, default=value, metavar="N")
    p.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    p.add_argument("--arrivals", type=int, default=20, help="arrivals per round")
    p.add_argument("--seconds", type=float, default=1.0, help="seconds of decoding alone, per round")
    p.add_argument("--output", type=Path, default=RESULTS)
    args = p.parse_args()
    for name, least in (("max_num_seqs", 2), ("rounds", 1), ("arrivals", 2), ("prompt", 1)):
        integer(f"--{name.replace('_', '-')}", getattr(args, name), least)
    integer("--context", args.context, 2 * args.prompt)
    above("--seconds", args.seconds, 0)
    model, params = skv.from_pretrained(args.model, dtype=args.dtype)
    result = measure(model, params, args)
    about = machine(command("waiting"))
    head = ["steps per launch", "TTFT ms", "p95", "time of these steps, ms", "tokens/s of the other lanes"]
    columns = ("ttft_ms", "ttft_p95_ms", "steps_ms", "tokens_per_s")
    rows = [[steps, *(f"{row[name]:,.1f}" for name in columns)] for steps, row in result["steps"].items()]
    text = f"{headline(about)}\n\n{table(head, rows)}\n"
    print(text)
    write("waiting", {"machine": about} | result, text, args.output)


if __name__ == "__main__":
    sys.exit(exit_code(main))
