"""Time per output token with an exit head's drafts against plain decoding: medians of interleaved rounds.

    python -m benchmarks.exit_head --model runs/tiny_exit/export --text FILE [--out FILE.json]

The text is cut into prompts; every contender continues the same ones to a forced length, greedily. Verified
drafts must give plain decoding's tokens, which is checked. For the lossy rule the share of equal tokens is
reported.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import jax
import numpy as np

from benchmarks.common import interleaved, ratio, table
from swiftkv_jax.checkpoint.hf import from_pretrained
from swiftkv_jax.common.errors import UsageError, exit_code
from swiftkv_jax.common.folder import read_text
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.text.tokenizer import load_tokenizer


def contenders(drafts: list[int], threshold: float) -> dict[str, dict]:
    """Settings by name: plain decoding first."""
    checked = {f"drafts {k}": {"drafts": k, "drafter": "exit"} for k in drafts}
    lossy, (last, most) = {"exit_threshold": threshold}, list(checked.items())[-1]
    name = f"exits above {threshold}"
    return {"plain": {}} | checked | {name: lossy, f"{last}, {name}": most | lossy}


def measure(args: argparse.Namespace) -> dict:
    """Measure all contenders; returns the content of the JSON."""
    model, params = from_pretrained(args.model, dtype=args.dtype, cuts=None)  # cut once for all
    need = args.batch * args.prompt_tokens
    ids = np.asarray(load_tokenizer(args.model).encode(read_text(args.text))[:need], np.int32)
    if len(ids) < need:
        raise UsageError(f"{args.text} holds {len(ids)} tokens; {args.batch} prompts need {need}")
    prompts = ids.reshape(args.batch, args.prompt_tokens).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=args.new_tokens, ignore_eos=True)
    sizes = {"max_num_seqs": args.batch, "max_model_len": args.prompt_tokens + args.new_tokens}
    settings, answers, stats, pace = contenders(args.drafts, args.threshold), {}, {}, {}
    llms = {name: LLM.from_model(model, params, **sizes, **more) for name, more in settings.items()}

    def runner(name: str):
        def run():
            outputs = llms[name].generate(prompts, sampling, use_tqdm=False)
            answers[name] = [o.outputs[0].token_ids for o in outputs]
            stats[name] = llms[name].stats
            pace.setdefault(name, []).append(statistics.median(o.metrics.tpot for o in outputs))

        return run

    interleaved({name: runner(name) for name in llms}, args.rounds)
    pace = {name: values[1:] for name, values in pace.items()}  # the first of each compiled
    rows = {}
    for name in llms:
        equal = np.equal(answers[name], answers["plain"])
        rows[name] = {"tpot_ms": statistics.median(pace[name]) * 1e3}
        rows[name] |= {"ratio_to_plain": ratio(pace, name, "plain")}
        rows[name] |= {kind: stats[name][f"{kind}_tokens"] for kind in ("drafted", "accepted")}
        rows[name] |= {"equal_tokens": float(equal.mean())}
    given = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    device = jax.devices()[0].device_kind
    kernels = {name: llm.kernels for name, llm in llms.items()}
    return given | {"device": device, "jax": jax.__version__, "kernels": kernels, "rows": rows}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.exit_head", description=__doc__.splitlines()[0])
    p.add_argument("--model", required=True, metavar="DIR", help="a student with an exit head")
    p.add_argument("--text", required=True, type=Path, metavar="FILE", help="text to cut prompts from")
    p.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4], metavar="N")
    p.add_argument("--threshold", type=float, default=0.95, help="threshold of the lossy rule (0.95)")
    for name, value in (("batch", 1), ("prompt-tokens", 256), ("new-tokens", 64), ("rounds", 10)):
        p.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"(default {value})")
    return exit_code(lambda: report(p.parse_args(argv)))


def report(args: argparse.Namespace) -> None:
    result, lines = measure(args), []
    print(f"{result['device']}, jax {result['jax']}, batch {args.batch}, {args.rounds} rounds\n")
    for name, row in result["rows"].items():
        right = f"{row['accepted'] / row['drafted']:.1%}" if row["drafted"] else ""
        cells = [f"{row['tpot_ms']:.2f}", f"{row['ratio_to_plain']:.2f}", str(row["drafted"] or ""), right]
        lines.append([name, *cells, f"{row['equal_tokens']:.2%}"])
    print(table(["", "TPOT, ms", "ratio to no drafts", "drafted", "accepted", "equal tokens"], lines))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
