"""The same weights and prompts through this engine and through other systems, side by side.

    python -m benchmarks.peers [--model demo/teacher] [--rounds 5]
    python -m benchmarks.peers --model SmolLM2-135M-Instruct.Q4_1.gguf --name peers_smollm2

Decoding is greedy, in float32, with forced lengths, and the tokens must be identical. Hugging Face
transformers runs `generate` with sdpa attention in inference mode; llama.cpp, if llama-cpp-python and gguf
are installed, runs through its C API; each uses the best of its batch sizes. The SwiftKV student has the
teacher's own projections (untrained), which does not change its speed.
"""

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import swiftkv_jax as skv
from benchmarks.common import RESULTS, command, in_rounds, machine, ratio, seconds_of, table, timed, write
from benchmarks.llama_cpp_peer import LlamaCpp, write_gguf

BATCHES = (1, 8, 32)
Generate = Callable[[list[list[int]], int], list[list[int]]]


def in_batches(generate: Generate, batch: int, prompts: list[list[int]], outputs: int) -> list[list[int]]:
    """The tokens from `generate`, called on `batch` prompts of similar lengths at a time."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out: dict[int, list[int]] = {}
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        out |= zip(some, generate([prompts[i] for i in some], outputs), strict=True)
    return [out[i] for i in range(len(prompts))]


def by_transformers(model, prompts: list[list[int]], outputs: int) -> list[list[int]]:
    """Greedy tokens of one left-padded batch."""
    import torch

    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        how = {"do_sample": False, "max_new_tokens": outputs, "min_new_tokens": outputs}
        got = model.generate(ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, **how)
    return [row[width:].tolist() for row in got]


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", default="demo/teacher", help="a standard model's folder, or a GGUF file")
    p.add_argument("--lengths", type=int, nargs=2, default=[16, 512], metavar=("LEAST", "MOST"))
    for name, value in (("prompts", 32), ("outputs", 64), ("rounds", 5), ("threads", 2)):
        p.add_argument(f"--{name}", type=int, default=value, metavar="N")
    p.add_argument("--name", default="peers", help="of the files written (default peers)")
    p.add_argument("--output", type=Path, default=RESULTS)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    model, params = skv.from_pretrained(args.model, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        read = args.model
        if Path(read).is_file():  # GGUF, which transformers is given as safetensors
            skv.save_pretrained(read := folder, model, params)
        peer = AutoModelForCausalLM.from_pretrained(read, dtype=torch.float32, attn_implementation="sdpa")
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
    peers: dict[str, Generate] = {"transformers": partial(by_transformers, peer)}
    if all(importlib.util.find_spec(name) for name in ("llama_cpp", "gguf")):
        with tempfile.TemporaryDirectory() as folder:
            write_gguf(peer, Path(folder) / "model.gguf")
            context = sum(len(p) + args.outputs for p in prompts)
            llama = LlamaCpp(Path(folder) / "model.gguf", args.prompts, context, args.threads)
        peers["llama.cpp"] = llama.generate
    else:
        print("llama.cpp is left out: pip install '.[peers]'")
    want = in_batches(peers["transformers"], 8, prompts, args.outputs)

    def same(got: list[list[int]]) -> int:
        return sum(a == b for a, b in zip(want, got, strict=True))

    identical, batches, runs = {}, {}, {}
    for name, generate in peers.items():
        by_batch = {b: partial(in_batches, generate, b, prompts, args.outputs) for b in BATCHES}
        identical[name] = same(by_batch[8]())
        batches[name] = {b: seconds_of(run) for b, run in by_batch.items()}
        best = min(BATCHES, key=batches[name].__getitem__)
        runs[f"{name}, batch {best}"] = partial(seconds_of, by_batch[best])
    for name, llm in llms.items():
        runs[name] = partial(timed, llm, prompts, args.outputs)
    greedy = skv.SamplingParams(temperature=0.0, max_tokens=args.outputs, ignore_eos=True)
    ours = llms["swiftkv-jax, standard"].generate(prompts, greedy, use_tqdm=False)
    identical["swiftkv-jax"] = same([output.outputs[0].token_ids for output in ours])
    seconds = in_rounds(runs, args.rounds)
    base, tokens = next(iter(runs)), sum(lengths.tolist()) + args.prompts * args.outputs
    speeds = {name: tokens / statistics.median(s) for name, s in seconds.items()}
    rows = {name: {"tokens_per_s": speeds[name], "gain": ratio(seconds, base, name)} for name in seconds}
    result = {"machine": machine(command("peers")), "identical": identical, "rows": rows}
    result |= {"kernels": {name: llm.kernels for name, llm in llms.items()}, "prompts": args.prompts}
    result |= {"seconds_by_batch": batches}
    lines = [[name, f"{row['tokens_per_s']:,.0f}", f"{row['gain']:.2f}"] for name, row in rows.items()]
    info = result["machine"]
    text = (
        f"{info['command']}, {info['device']}, jax {info['jax']}, torch {torch.__version__}, {info['date']}; "
        f"completions identical to those of transformers at batch 8, of {args.prompts}: "
        + ", ".join(f"{name} {count}" for name, count in identical.items())
        + f"\n\n{table(['', 'tokens/s', 'gain'], lines)}\n"
    )
    print(text)
    write(args.name, result, text, args.output)


if __name__ == "__main__":
    main()
