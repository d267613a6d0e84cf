"""The command line: python -m benchmarks.serving [fixed] [sharegpt] [rates] [budgets]."""

import argparse
import dataclasses
import math
import shlex
import statistics
import sys
from functools import partial
from pathlib import Path

from benchmarks.common import RESULTS, SYSTEMS, normalised_tflops, write
from benchmarks.serving import bench, report, workloads
from benchmarks.serving.timeline import DETAILS
from swiftkv_jax.common.checks import above, choice, integer, number
from swiftkv_jax.common.errors import Parser, UsageError, exit_code
from swiftkv_jax.config.hf import read_config_json
from swiftkv_jax.config.model import ModelConfig

WORKLOADS = ("fixed", "sharegpt", "rates", "budgets")
_GOALS = ("ttft", "tpot", "e2el")


def parser() -> Parser:
    about = "Time servers as `vllm bench serve` does, side by side: standard, SwiftKV, + AcrossKV, + fp8. "
    about += "Lengths are in tokens; rates in requests per second, or, with an x behind, in what the first "
    about += "system can take."
    usage = "%(prog)s [fixed] [sharegpt] [rates] [budgets] [flags]"
    form = partial(argparse.HelpFormatter, max_help_position=30, width=110)
    how = {"description": about, "formatter_class": form, "allow_abbrev": False}
    p = Parser(prog="python -m benchmarks.serving", usage=usage, **how)
    p.add_argument("workloads", nargs="*", metavar="workload", help="what to measure (default fixed)")
    add = p.add_argument
    add("--model", default="demo/teacher", metavar="DIR", help="a standard model's folder (demo/teacher)")
    add("--dtype", default="float32", help="dtype of weights and cache (float32)")
    add("--systems", nargs="+", metavar="NAME", help=f"some of {', '.join(SYSTEMS)}")
    add("--base-url", nargs="+", metavar="NAME=URL", help="servers that run already; none is started")
    add("--alone", action="store_true", help="run one server at a time, if a device's memory holds only one")
    add("--lengths", type=int, nargs="+", default=[*workloads.LENGTHS], metavar="N", help="lengths of fixed")
    add("--load", type=int, default=8000, metavar="N", help="tokens in, of rates and budgets (8000)")
    add("--output-len", type=int, default=workloads.OUTPUTS, metavar="N", help="tokens out (256)")
    add("--scale", type=float, metavar="X", help="divides all lengths (default: what makes 128K fit)")
    add("--ratios", type=float, nargs="+", default=[*workloads.RATIOS], metavar="X", help="of sharegpt")
    add("--dataset", type=Path, metavar="FILE", help="a ShareGPT json, instead of lengths like its")
    shares = "0.25x 0.5x 0.75x 0.9x 1x 1.25x".split()
    add("--rates", nargs="+", default=shares, metavar="R", help="arrival rates of rates")
    sizes = [1.0, 0.5, 0.25, 0.2]
    add("--budgets", type=float, nargs="+", default=sizes, metavar="X", help="cache sizes of budgets")
    add("--num-prompts", type=int, default=32, metavar="N", help="requests of a run (32)")
    add("--rounds", type=int, default=3, metavar="N", help="runs of each, interleaved (3)")
    add("--num-warmups", type=int, default=1, metavar="N", help="requests before, not counted (1)")
    add("--burstiness", type=float, default=1.0, metavar="X", help="1 is Poisson, inf is even (1)")
    add("--max-concurrency", type=int, metavar="N", help="concurrent requests (no limit)")
    add("--goodput", nargs="+", default=[], metavar="GOAL:MS", help="such as ttft:500 tpot:50 e2el:5000")
    add("--metric-percentiles", default="90,99", metavar="P,P", help="(90,99); tables show the last one")
    add("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="kept in the JSON")
    add("--save-detailed", action="store_true", help="keep every request's figures in the JSON")
    add("--share", type=int, default=2, metavar="N", help="layers that share a row in AcrossKV (2)")
    add("--max-num-seqs", type=int, default=16, metavar="N", help="sequences a server runs at once (16)")
    add("--page-size", type=int, default=64, metavar="N", help="tokens of a cache page (64)")
    add("--no-warm-up", action="store_true", help="compile on first use: for a quick look, not for measuring")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts, lengths and arrivals (0)")
    add("--output", type=Path, default=RESULTS, metavar="DIR", help="(benchmarks/results)")
    return p


def checked(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, with what is derived from them: goals, percentiles, wanted rates, systems.

    Raises:
      UsageError: an argument is invalid.
    """
    args = parser().parse_args(argv)
    args.workloads = args.workloads or ["fixed"]
    for name in args.workloads:
        choice("workload", name, WORKLOADS)
    for name in ("load", "output_len", "num_prompts", "rounds", "share", "max_num_seqs", "page_size"):
        integer(_flag(name), getattr(args, name), 1)
    integer("--num-warmups", args.num_warmups, 0)
    if args.max_concurrency is not None:
        integer("--max-concurrency", args.max_concurrency, 1)
    if args.scale is not None:
        above("--scale", args.scale, 0)
    if args.burstiness != math.inf:
        above("--burstiness", args.burstiness, 0)
    for name, check, least in (("lengths", integer, 1), ("ratios", number, 0), ("budgets", above, 0)):
        for value in getattr(args, name):
            check(_flag(name), value, least)
    args.goals = {}
    for name, _, value in (text.partition(":") for text in args.goodput):
        args.goals[choice("--goodput", name, _GOALS)] = above("--goodput", _number("goodput", value), 0)
    # (a number, whether its unit is the rate that the first system can sustain); inf is all at once.
    rates = [(_number("rates", text.removesuffix("x")), text.endswith("x")) for text in args.rates]
    args.wanted = [(r if r == math.inf else above("--rates", r, 0), relative) for r, relative in rates]
    percentiles = [_number("metric-percentiles", part) for part in args.metric_percentiles.split(",")]
    args.percentiles = [number("--metric-percentiles", value, 0, 100) for value in percentiles]
    args.metadata = dict(_pair("metadata", text) for text in args.metadata)
    args.base_url = dict(_pair("base-url", text) for text in args.base_url or ())
    if args.base_url and ("budgets" in args.workloads or args.systems or args.alone):
        raise UsageError(
            "--base-url names servers that run already: no budgets, --systems or --alone with it"
        )
    for name in args.systems or ():
        choice("--systems", name, SYSTEMS)
    return args


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--{flag}: {text!r} is not a number") from None


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise UsageError(f"--{flag} must be NAME=VALUE, not {text!r}")
    return name, value


def run(args: argparse.Namespace, say) -> tuple[list[dict], dict]:
    """Run all workloads; returns the runs, and the settings for the report."""
    folder = Path(args.model)
    if not (folder / "config.json").is_file():
        raise UsageError(f"--model {folder} is not a model's folder: it has no config.json")
    config = ModelConfig.from_hf(read_config_json(folder / "config.json"))
    if args.dataset and "sharegpt" in args.workloads:
        from swiftkv_jax.text.tokenizer import load_tokenizer

        args.tokenizer = load_tokenizer(folder)
    runs: list[dict] = []
    about: dict = {"left_out": {}, "machine": {}}
    for workload in args.workloads:
        budgets = workload == "budgets"
        runs += _budgets(args, config, about, say) if budgets else _even(args, config, workload, about, say)
    for each in runs:
        prompt = each["total_input_tokens"] // max(1, each["completed"])
        each["normalised_tflops"] = normalised_tflops(config, each["total_token_throughput"], prompt)
    return runs, about


def _even(args, config: ModelConfig, workload: str, about: dict, say) -> list[dict]:
    """A workload whose servers are the same for all its points."""
    systems = list(args.base_url) or args.systems or [name for name in SYSTEMS if name != "merge-all"]
    point = None
    if workload == "rates":
        point, context = bench.load(args, config)
        points = [dataclasses.replace(point, name="inf")]
    else:
        points, context = (bench.fixed if workload == "fixed" else bench.sharegpt)(args, config)
    flags = {name: bench.server_flags(args, context) for name in systems}
    with bench.Fleet(args, flags, say) as fleet:
        runs = bench.measure(args, fleet, workload, points, systems, say)
        if point:
            most = statistics.median(r["request_throughput"] for r in runs if r["system"] == systems[0])
            at_rates = bench.rates(point, args.wanted, most)
            runs += bench.measure(args, fleet, workload, at_rates, systems, say)
        _note(about, systems, fleet.described)
    return runs


def _budgets(args, config: ModelConfig, about: dict, say) -> list[dict]:
    """The budget workload, with separate servers for every budget; systems with too small a cache are left
    out."""
    systems, runs = args.systems or list(SYSTEMS), []
    point, context = bench.load(args, config)
    for share in args.budgets:
        pages = {name: bench.budget_pages(args, config, context, share, name) for name in systems}
        fit = [name for name in systems if pages[name]]
        name = f"{share:.0%}"
        about["left_out"][name] = [name for name in systems if not pages[name]]
        flags = {name: bench.server_flags(args, context, pages[name]) for name in fit}
        with bench.Fleet(args, flags, say) as fleet:
            here = dataclasses.replace(point, name=name)
            runs += bench.measure(args, fleet, "budgets", [here], fit, say)
            _note(about, systems, fleet.described)
    return runs


def _note(about: dict, systems: list[str], described: dict[str, dict]) -> None:
    about["systems"] = systems
    for name, words in described.items():
        about["machine"] = words.get("machine") or about["machine"]
        about.setdefault("servers", {})[name] = words


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1 when not one request was answered; 2 for bad usage; 130 for Ctrl-C."""
    return exit_code(lambda: _main(argv), "interrupted; no results were saved")


def _main(argv: list[str] | None) -> int:
    args = checked(argv)
    runs, about = run(args, lambda text: print(text, file=sys.stderr, flush=True))
    words = ["python", "-m", "benchmarks.serving", *(sys.argv[1:] if argv is None else argv)]
    about |= {"command": shlex.join(words), "percentile": args.percentiles[-1]}
    table = report.aggregate(runs, about["percentile"], about["systems"][0])
    text = report.markdown(about, table)
    print(text)
    if not args.save_detailed:
        runs = [{key: value for key, value in run.items() if key not in DETAILS} for run in runs]
    write("serving", {"about": about, "runs": runs}, text, args.output)
    report.plots(table, args.output)
    return 0 if any(run["completed"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
