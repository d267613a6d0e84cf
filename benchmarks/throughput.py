"""Prompt and output tokens per second of a saturated engine: standard, merge-all, SwiftKV, AcrossKV, fp8.

    python -m benchmarks.throughput [--systems swiftkv acrosskv] [--workloads 512:64 1984:62] [--rounds 5]

All variants run the teacher's weights on the same engine with the same settings, in one process, in turn;
ratios are medians over the rounds. Rows are bfloat16, those of the last variant fp8. Output lengths are
forced. Quality is not measured here, since untrained students are not worth serving. Beside each gain is the
one that the run's own costs predict, (n + c) / (n r + c): n prompt tokens per output token, c the cost of an
output token in prompt tokens, r the remaining share of a prompt token's cost with SwiftKV.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import numpy as np

import swiftkv_jax as skv
from benchmarks import common
from benchmarks.common import RESULTS, SYSTEMS, Variant, ratio, table, timed


def measure(llms: dict[str, skv.LLM], length: int, outputs: int, requests: int, rounds: int) -> dict:
    """One workload: tokens per second, gains, and what the costs of the same run predict."""
    vocab = next(iter(llms.values())).model.config.vocab_size
    prompts = np.random.default_rng(length).integers(2, vocab, (requests, length)).tolist()
    stats = {}

    def whole(name: str) -> float:
        seconds = timed(llms[name], prompts, outputs)
        stats[name] = dict(llms[name].stats)
        return seconds

    # All in one round, so that drifts of the machine's speed affect all variants alike.
    runs = {(name, 1): partial(timed, llm, prompts, 1) for name, llm in llms.items()}
    runs |= {(name, outputs): partial(whole, name) for name in llms}
    seconds = common.in_rounds(runs, rounds)
    first, all_of = ({name: seconds[name, count] for name in llms} for count in (1, outputs))
    pairs = zip(first["standard"], all_of["standard"], strict=True)
    costs = [((b - a) / (requests * (outputs - 1))) / (a / (requests * length)) for a, b in pairs]
    n, c = length / outputs, statistics.median(costs)
    out = {}
    for name, llm in llms.items():
        r, last = ratio(first, name, "standard"), stats[name]
        steps = max(1, last["decoded_steps"])
        out[name] = {"tokens_per_s": requests * (length + outputs) / statistics.median(all_of[name])}
        out[name] |= {"gain": ratio(all_of, "standard", name), "predicted_gain": (n + c) / (n * r + c)}
        out[name] |= {"prompt_share": r, "output_cost": c, "tpot_ms": 1e3 * last["decode_seconds"] / steps}
        out[name] |= {"host_ms_per_step": 1e3 * last["decode_host_seconds"] / steps}
        out[name] |= {"cache_bytes_per_token": llm.cache_bytes_per_token, "kernels": llm.kernels}
    return out


def workload(text: str) -> tuple[int, int]:
    """IN:OUT, as numbers of tokens."""
    length, _, outputs = text.partition(":")
    if not (length.isdecimal() and outputs.isdecimal() and int(length) >= 1 and int(outputs) >= 2):
        raise argparse.ArgumentTypeError(f"{text!r} is not IN:OUT, 1 token or more in and 2 or more out")
    return int(length), int(outputs)


def budgets(model, params, kinds: list[Variant], args) -> dict:
    """Table 3: throughput if the cache may take only a share of the memory that a standard model needs."""
    length, outputs = args.budget_workload
    context, page = length + outputs, args.page_size
    standard = common.engine(model, params, kinds[0], context, page_size=page).cache_bytes_per_token
    prompts = np.random.default_rng(1).integers(2, model.config.vocab_size, (args.requests, length)).tolist()
    out = {}
    for share in args.budgets:
        budget = share * standard * args.max_num_seqs * context
        llms = {}
        for kind in kinds:
            per_token = common.engine(model, params, kind, context, page_size=page).cache_bytes_per_token
            if pages := common.pages_within(budget, per_token, page, context):
                settings = {"num_pages": pages, "page_size": page, "max_num_seqs": args.max_num_seqs}
                llms[kind.name] = common.engine(model, params, kind, context, **settings)
        runs = {name: partial(timed, llm, prompts, outputs) for name, llm in llms.items()}
        seconds = common.in_rounds(runs, args.rounds)
        tokens = args.requests * context
        out[f"{share:.0%}"] = {name: tokens / statistics.median(s) for name, s in seconds.items()}
    return out


def report(result: dict) -> str:
    """The result as Markdown."""
    parts = [common.headline(result["machine"]) + "\n"]
    head = ["variant", "tokens/s", "gain", "predicted", "r", "c", "TPOT ms", "host ms/step", "B/token"]
    forms = {"tokens_per_s": ",.0f", "gain": ".2f", "predicted_gain": ".2f", "prompt_share": ".2f"}
    forms |= {"output_cost": ".1f", "tpot_ms": ".2f", "host_ms_per_step": ".3f", "cache_bytes_per_token": ","}
    for name, rows in result["workloads"].items():
        lines = [
            [variant, *(f"{row[k]:{form}}" for k, form in forms.items())] for variant, row in rows.items()
        ]
        parts += [f"{name} tokens in:out\n", table(head, lines) + "\n"]
    if result["budgets"]:
        names = list(next(iter(result["budgets"].values())))
        lines = [
            [share, *(f"{row[name]:,.0f}" if name in row else "too small" for name in names)]
            for share, row in result["budgets"].items()
        ]
        parts.append("tokens/s by cache budget (of what a full standard batch needs)\n")
        parts.append(table(["budget", *names], lines) + "\n")
    return "\n".join(parts)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", default="demo/teacher", help="a standard model's folder")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--cache-dtype", default="bfloat16", help="dtype of the cache, except for the fp8 variant")
    p.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="standard always is")
    p.add_argument("--workloads", nargs="+", type=workload, default=[(512, 64), (1984, 62)], metavar="IN:OUT")
    p.add_argument("--budgets", type=float, nargs="*", default=[1.0, 0.5, 0.25, 0.1])
    p.add_argument("--budget-workload", type=workload, default=(512, 64), metavar="IN:OUT")
    p.add_argument("--share", type=int, default=2, help="AcrossKV group (default 2)")
    for name, value in (("requests", 64), ("rounds", 5), ("max-num-seqs", 64), ("page-size", 64)):
        p.add_argument(f"--{name}", type=int, default=value, metavar="N")
    p.add_argument("--output", type=Path, default=RESULTS)
    args = p.parse_args()
    model, params = skv.from_pretrained(args.model, dtype=args.dtype)
    every = zip(SYSTEMS, common.variants(model.config.num_layers, args.share, args.cache_dtype), strict=True)
    kinds = [variant for name, variant in every if name in ("standard", *args.systems)]
    result: dict = {"machine": common.machine(common.command("throughput")), "workloads": {}, "budgets": {}}
    for length, outputs in args.workloads:
        sizes = {"max_num_seqs": args.max_num_seqs, "page_size": args.page_size}
        llms = {kind.name: common.engine(model, params, kind, length + outputs, **sizes) for kind in kinds}
        figures = measure(llms, length, outputs, args.requests, args.rounds)
        result["workloads"][f"{length}:{outputs}"] = figures
    result["budgets"] = budgets(model, params, kinds, args) if args.budgets else {}
    text = report(result)
    print(text)
    common.write("throughput", result, text, args.output)
    workloads = result["workloads"].items()
    gains = {name: {kind: row["gain"] for kind, row in rows.items()} for name, rows in workloads}
    common.bars(gains, ("tokens in:out", "throughput over standard"), args.output / "throughput.png")


if __name__ == "__main__":
    main()
