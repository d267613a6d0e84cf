"""The same weights and prompts through this engine and through Hugging Face transformers, side by side.

    python -m benchmarks.peers [--model demo/teacher] [--rounds 5]

Greedy, float32, forced lengths; the tokens must be identical. transformers runs `generate` with sdpa
attention in inference mode, at the best of its batch sizes. The SwiftKV student has the teacher's own
projections (untrained): its speed is that of a distilled one.
"""

import argparse
import statistics
from pathlib import Path

import numpy as np

import swiftkv_jax as skv
from benchmarks.latency import in_rounds, seconds_of
from benchmarks.throughput import RESULTS, machine, table, timed, write


def theirs(model, prompts: list[list[int]], outputs: int, batch: int) -> list[list[int]]:
    """Their greedy tokens, in left-padded batches of similar lengths."""
    import torch

    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out: dict[int, list[int]] = {}
    for at in range(0, len(order), batch):
        some = order[at : at + batch]
        width = max(len(prompts[i]) for i in some)
        ids = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in some])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in some])
        with torch.inference_mode():
            got = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=outputs,
                min_new_tokens=outputs,
                eos_token_id=None,
                pad_token_id=0,
            )
        out |= {i: row[width:].tolist() for i, row in zip(some, got, strict=True)}
    return [out[i] for i in range(len(prompts))]


def ours(llm: skv.LLM, prompts: list[list[int]], outputs: int) -> list[list[int]]:
    params = skv.SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", default="demo/teacher", help="a standard model's folder")
    p.add_argument("--prompts", type=int, default=32)
    p.add_argument("--lengths", type=int, nargs=2, default=[16, 512], metavar=("LEAST", "MOST"))
    p.add_argument("--outputs", type=int, default=64)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--output", type=Path, default=RESULTS)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    peer = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa")
    model, params = skv.from_pretrained(args.model, dtype="float32")
    settings = {"max_model_len": sum((args.lengths[1], args.outputs)), "max_num_seqs": args.prompts}
    settings |= {"prefix_caching": False}
    half = skv.KVPlan.swiftkv(model.config.num_layers, model.config.num_layers // 2)
    llms = {
        "swiftkv-jax, standard": skv.LLM.from_model(model, params, **settings),
        "swiftkv-jax, SwiftKV 50 %": skv.LLM.from_model(*skv.to_swiftkv(model, params, half), **settings),
    }
    random = np.random.default_rng(0)
    lengths = random.integers(args.lengths[0], args.lengths[1] + 1, args.prompts)
    prompts = [random.integers(2, model.config.vocab_size, n).tolist() for n in lengths]
    want = theirs(peer, prompts, args.outputs, 8)
    same = sum(
        a == b for a, b in zip(want, ours(llms["swiftkv-jax, standard"], prompts, args.outputs), strict=True)
    )
    batches = {b: seconds_of(lambda b=b: theirs(peer, prompts, args.outputs, b)) for b in (1, 8, 32)}
    best = min(batches, key=lambda b: batches[b])
    runs = {
        f"transformers, batch {best}": lambda: seconds_of(lambda: theirs(peer, prompts, args.outputs, best))
    }
    runs |= {name: lambda llm=llm: timed(llm, prompts, args.outputs) for name, llm in llms.items()}
    seconds = in_rounds(runs, args.rounds)
    base, tokens = next(iter(runs)), sum(lengths.tolist()) + args.prompts * args.outputs
    rows = {
        name: {
            "tokens_per_s": tokens / statistics.median(s),
            "gain": statistics.median(b / a for a, b in zip(s, seconds[base], strict=True)),
        }
        for name, s in seconds.items()
    }
    result = {"machine": machine("python -m benchmarks.peers"), "identical": same, "rows": rows}
    result |= {"prompts": args.prompts, "transformers_seconds_by_batch": batches}
    lines = [[name, f"{row['tokens_per_s']:,.0f}", f"{row['gain']:.2f}"] for name, row in rows.items()]
    info = result["machine"]
    text = (
        f"{info['command']}, {info['device']}, jax {info['jax']}, torch {torch.__version__}, {info['date']}; "
        f"{same} of {args.prompts} completions identical\n\n" + table(["", "tokens/s", "gain"], lines) + "\n"
    )
    print(text)
    write("peers", result, text, args.output)


if __name__ == "__main__":
    main()
