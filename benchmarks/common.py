"""Shared code of the benchmarks: engines to compare, interleaved rounds, ratios, tables, plots, results."""

import dataclasses
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

import swiftkv_jax as skv
from swiftkv_jax.analysis.flops import prompt_gflop
from swiftkv_jax.analysis.plots import new_figure, save

Name = TypeVar("Name", bound=Hashable)
RESULTS = Path(__file__).parent / "results"
SYSTEMS = ("standard", "merge-all", "swiftkv", "acrosskv", "fp8")  # in the order of `variants`


@dataclasses.dataclass(frozen=True)
class Variant:
    """A caching scheme: its plan, and the dtype of its rows."""

    name: str
    plan: skv.KVPlan
    cache_dtype: str


def variants(layers: int, share: int, cache_dtype: str) -> list[Variant]:
    """The columns of the paper's Table 3; `cache_dtype` of all rows but the last variant's."""
    half = layers // 2
    shared = skv.KVPlan.swiftkv(layers, half, share)
    return [
        Variant("standard", skv.KVPlan.standard(layers), cache_dtype),
        Variant("merge-all", skv.KVPlan.merge_all(layers), cache_dtype),
        Variant("SwiftKV 50 %", skv.KVPlan.swiftkv(layers, half), cache_dtype),
        Variant(f"+ {share}-way AcrossKV", shared, cache_dtype),
        Variant("+ fp8", shared, "float8_e4m3fn"),
    ]


def engine(model, params, variant: Variant, context: int, **settings) -> skv.LLM:
    """An LLM of this variant; prefixes are not shared, so that every prompt token is paid for."""
    if variant.plan != model.plan:
        model, params = skv.to_swiftkv(model, params, variant.plan)
    settings |= {"cache_dtype": variant.cache_dtype, "prefix_caching": False}
    return skv.LLM.from_model(model, params, max_model_len=context, **settings)


def pages_within(budget: float, bytes_per_token: int, page: int, context: int) -> int:
    """Pages that `budget` bytes of cache hold; 0 if they are too few for one sequence of `context` tokens."""
    pages = int(budget / (bytes_per_token * page))
    return pages if pages >= -(-context // page) else 0


def timed(llm: skv.LLM, prompts: list[list[int]], outputs: int) -> float:
    """Seconds from the first prompt's arrival to the last token."""
    params = skv.SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
    requests = [llm.request(prompt, params) for prompt in prompts]
    began = time.perf_counter()
    for _, output in llm.run(requests):
        assert len(output.outputs[0].token_ids) == outputs
    return time.perf_counter() - began


def normalised_tflops(config: skv.ModelConfig, rate: float, context: int) -> float:
    """TFLOPS that the standard model's layers need for `rate` tokens per second, in and out, at prompts of
    `context` tokens, whatever was computed for them (SwiftKV paper, section 4.2)."""
    return rate * prompt_gflop(config, None, max(1, context)) / 1e3


def in_turn(names: Iterable[Name], number: int) -> list[Name]:
    """The order of round `number`: each round begins with the next name.

    Reversing the order instead would favour the first and the last: only these would follow themselves, with
    their weights still in the processor's caches.
    """
    names = list(names)
    first = number % max(1, len(names))
    return names[first:] + names[:first]


def in_rounds(runs: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """The seconds that each of `runs` returns, in `rounds` interleaved rounds of all of them."""
    for run in runs.values():
        run()  # compiles
    seconds = {name: [] for name in runs}
    for number in range(rounds):
        for name in in_turn(runs, number):
            seconds[name].append(runs[name]())
    return seconds


def seconds_of(run: Callable) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def interleaved(runs: Mapping[Name, Callable], rounds: int) -> dict[Name, list[float]]:
    """Seconds of each callable, in `rounds` interleaved rounds of all of them."""
    return in_rounds({name: partial(seconds_of, run) for name, run in runs.items()}, rounds)


def ratio(seconds: Mapping[Name, list[float]], name: Name, base: Name) -> float:
    """Seconds of `name` over those of `base`: the median of the rounds. ratios."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bars(
    values: dict[str, dict[str, float]],
    words: tuple[str, str],
    path: Path,
    colours: Mapping[str, str] | None = None,
) -> None:
    """A bar chart with the kinds side by side in every group. `words`: labels of the groups' and the values'
    axes; `colours`: of the kinds, by default in order."""
    figure, (axis,) = new_figure()
    figure.set_size_inches(8, 4)
    kinds = list(dict.fromkeys(kind for row in values.values() for kind in row))
    width = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        heights = [row.get(kind, 0.0) for row in values.values()]
        places, colour = np.arange(len(values)) + i * width, (colours or {}).get(kind)
        drawn = axis.bar(places, heights, 0.95 * width, label=kind, color=colour)
        axis.bar_label(drawn, [f"{height:.3g}" if height else "" for height in heights], fontsize=7)
    axis.set_xticks(np.arange(len(values)) + 0.4 - width / 2, list(values))
    axis.set(xlabel=words[0], ylabel=words[1])
    figure.legend(loc="outside upper center", ncols=len(kinds), fontsize=8)
    save(figure, path)


def write(name: str, result: dict, text: str, folder: Path) -> None:
    """Write NAME.json and NAME.md into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / f"{name}.md").write_text(text)


def not_measured(name: str, title: str, lacking: str, command: str, folder: Path) -> str:
    """Write NAME.json and NAME.md saying so, unless earlier measurements are there; returns which was
    done."""
    path = folder / f"{name}.json"
    if path.exists() and json.loads(path.read_text()) != {"measured": False}:
        return f"no {lacking} here: {path.with_suffix('.md')} keeps what was measured before"
    text = f"# {title}\n\nNot measured: no {lacking} was available. `{command}` writes this file.\n"
    write(name, {"measured": False}, text, folder)
    return f"no {lacking} here: {path.with_suffix('.md')} says not measured"


def command(module: str) -> str:
    """This process's command line."""
    return " ".join([f"python -m benchmarks.{module}", *sys.argv[1:]])


def machine(command: str) -> dict:
    """The machine, time and commit (if known) of a result."""
    device, info = jax.devices()[0], Path("/proc/cpuinfo")
    kind = f"{len(jax.devices())} x {device.device_kind}"
    if device.platform == "cpu":
        names = re.findall(r"^model name\s*: (.*)$", info.read_text() if info.exists() else "", re.MULTILINE)
        kind = f"{os.cpu_count()} CPU cores ({names[0] if names else platform.machine()})"
    run, git = {"cwd": RESULTS.parent, "capture_output": True, "text": True}, "git rev-parse --short HEAD"
    commit = subprocess.run(git.split(), **run).stdout.strip() if shutil.which("git") else ""
    about = {"command": command, "device": kind, "jax": jax.__version__}
    return about | {"date": time.strftime("%Y-%m-%d"), "commit": commit}  # "" outside a clone


def headline(about: dict) -> str:
    """`machine` in a line."""
    return f"{about['command']}, {about['device']}, jax {about['jax']}, {about['date']}"


def shown(result: dict, output: Path | None) -> None:
    """Print a result as JSON, and write it to `output`."""
    text = json.dumps(result, indent=2)
    print(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
