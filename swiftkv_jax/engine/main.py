"""The command line of serve.py: a batch of prompts in, completions out; or the HTTP server."""

import argparse
import dataclasses
import statistics
import sys
import traceback
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from swiftkv_jax.engine.http import flags as http
from swiftkv_jax.engine.jobs import DEFAULT_MAX_TOKENS, Job, Output, make_jobs, output_row, read_lines
from swiftkv_jax.engine.request import RequestMetrics, SamplingParams
from swiftkv_jax.errors import Parser, UsageError

_DEMO = Path("demo") / "teacher"
_ENGINE = {  # flag: (type, help); the fields of engine.Settings, whose defaults hold
    "max-num-seqs": (int, "sequences at once (default 16)"),
    "max-num-batched-tokens": (int, "tokens of one step (default 2048)"),
    "steps-per-launch": (int, "tokens decoded before the host looks (default 8)"),
    "page-size": (int, "tokens of a cache page (default 64)"),
    "num-pages": (int, "pages of the cache (default: what memory allows)"),
    "memory-fraction": (float, "of the device's memory that weights and cache may take (default 0.9)"),
    "cache-dtype": (str, "auto, float32, bfloat16, float16, float8_e4m3fn or int8"),
    "attention": (str, "kernel that reads pages, by name (default: the platform's)"),
    "fill": (str, "fused kernel that fills prompts' pages, by name (default: unfused)"),
    "scoring": (str, "kernel that scores whole prompts, by name (default: the model's)"),
    "drafts": (int, "tokens guessed and checked at once (default 0)"),
    "drafter": (str, "who guesses: prompt (the default), or exit, the model's exit head"),
    "exit-threshold": (float, "lossy: tokens the exit head is surer of run no further (default off)"),
}
_SAMPLING = {  # flag: (type, help)
    "max-tokens": (
        int,
        f"tokens to generate at most (default {DEFAULT_MAX_TOKENS}, or what the context leaves)",
    ),
    "temperature": (float, "0 is greedy"),
    "top-k": (int, "keep the k likeliest tokens; 0 keeps all"),
    "top-p": (float, "keep the likeliest tokens that sum to p"),
    "min-p": (float, "keep tokens at least p times as likely as the likeliest"),
    "repetition-penalty": (float, "above 1: tokens seen before are less likely"),
}


def build_parser() -> Parser:
    """All flags of serve.py."""
    p = Parser(
        prog="serve.py",
        usage="serve.py [--model DIR] [--input FILE] [--output FILE] [flags], or serve.py --http [flags]",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=32, width=100),
        epilog="Flags override generation_config.json; an input line overrides both: "
        '{"prompt": "...", "seed": 9}.',
        allow_abbrev=False,
    )
    p.add_argument("--model", metavar="DIR", help="folder or hub id (default: demo/teacher)")
    p.add_argument(
        "--input",
        metavar="FILE",
        help=".jsonl of {prompt | messages | prompt_token_ids, id, ...}, .txt of one prompt a line, "
        "or - for stdin (default: a few examples)",
    )
    p.add_argument(
        "--output", metavar="FILE", help=".jsonl, or - for stdout (default: readable text on stdout)"
    )
    p.add_argument("--resume", action="store_true", help="finish what an interrupted run left in --output")
    p.add_argument("--skip-bad-lines", action="store_true", help="go on without the input lines that are bad")
    p.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    sampling = p.add_argument_group("sampling")
    for name, (kind, text) in _SAMPLING.items():
        sampling.add_argument(f"--{name}", type=kind, metavar="X" if kind is float else "N", help=text)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before TEXT; may be repeated")
    sampling.add_argument(
        "--seed", type=int, default=0, metavar="N", help="line i samples with seed N + i (default 0)"
    )
    engine = p.add_argument_group("engine")
    engine.add_argument(
        "--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: the checkpoint's)"
    )
    engine.add_argument(
        "--max-model-len", type=int, metavar="N", help="context in tokens (default: the model's)"
    )
    for name, (kind, text) in _ENGINE.items():
        engine.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=text)
    http.add_flags(p)
    return p


def main(argv: list[str] | None = None, root: Path = Path(), api_key: str | None = None) -> int:
    """Run; `root` is where demo/ lies, `api_key` one more key for the server.

    Exit code 0, 2 for bad usage, 1 for a failure, 130 for Ctrl-C.
    """
    try:
        args = build_parser().parse_args(argv)
        return _serve(args, root, api_key) if args.http else _run(args, root)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, root: Path) -> int:
    if args.resume and args.output in (None, "-"):
        raise UsageError("--resume needs --output FILE: the file to finish")
    lines = read_lines(args.input)
    if args.compare:
        raise UsageError("--compare belongs to --http, not to a batch")
    flags = _given(args, (*_SAMPLING, "stop"))
    SamplingParams().updated(flags)  # a bad flag is found before the model is loaded
    say, llm = _say(args), _load(args, root)
    defaults = llm.defaults.updated({"max_tokens": None} | flags)
    _describe(llm, defaults, args.model or _demo(root), say)
    jobs = make_jobs(lines, defaults, args.seed, llm, args.skip_bad_lines, say)
    if not args.output:
        return _generate(llm, jobs, None, args, say)
    output = Output(args.output, args.resume, jobs)
    if len(output.left) < len(jobs):
        say(f"{len(jobs) - len(output.left)} of {len(jobs)} prompts are done already in {args.output}")
    return _generate(llm, output.left, output, args, say)


def _serve(args: argparse.Namespace, root: Path, api_key: str | None) -> int:
    """OpenAI's API until a signal; sampling flags are the server's defaults."""
    batch = ("input", "output", "resume", "skip_bad_lines", "max_tokens", "stop")
    wrong = [f"--{name.replace('_', '-')}" for name in batch if getattr(args, name)]
    if wrong:
        raise UsageError(f"{', '.join(wrong)} belong to a batch, not to --http")
    flags = _given(args, _SAMPLING)
    SamplingParams().updated(flags)
    settings = http.http_settings(args, str(args.model or _demo(root)), api_key)
    second = http.compared_name(args.compare, settings.model_name) if args.compare else ""
    try:
        from swiftkv_jax.engine.http import server
        from swiftkv_jax.engine.http.app import Api
    except ImportError as error:
        raise UsageError(f"--http needs {error.name}: pip install 'swiftkv-jax[serve]'") from error

    say = _say(args)
    with server.listen(*http.address(args.http)) as listener:
        llms = _loaded(args, root, {settings.model_name: None} | ({second: args.compare} if second else {}))
        for name, llm in llms.items():
            llm.defaults = llm.defaults.updated(flags)
            _describe(llm, llm.defaults, name, say)
        others = dict(llms)
        api = Api(others.pop(settings.model_name), settings, others)
        host, port = listener.getsockname()[:2]
        keys = f"{len(settings.api_keys)} API keys" if settings.api_keys else "no API key"
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"listening {where} ({', '.join(llms)}; {keys}); a page for people is at {where}/")
        return server.run(api, listener, say)


def _loaded(args: argparse.Namespace, root: Path, folders: dict[str, str | None]) -> dict:
    """The LLMs of a server, by name, each with a bounded queue; None is --model, or the demo's."""
    llms = {name: _load(args, root, folder) for name, folder in folders.items()}
    if len(llms) > 1 and args.num_pages is None:
        _share_memory(list(llms.values()))
    for llm in llms.values():
        bounds = http.queue_bounds(args, llm.settings.max_num_batched_tokens, llm.settings.max_model_len)
        llm.settings = dataclasses.replace(llm.settings, **bounds)
    return llms


def _share_memory(llms: list) -> None:
    """Room for the caches of models on the same devices: each gets its part of what the weights leave."""
    import jax

    from swiftkv_jax.engine.settings import settle

    for llm in llms:
        devices = sorted(jax.tree.leaves(llm.params)[0].devices(), key=lambda device: device.id)
        stats = devices[0].memory_stats() or {}
        used = stats["bytes_in_use"] / stats["bytes_limit"] if "bytes_limit" in stats else 0.0
        part = used + (llm.settings.memory_fraction - used) / len(llms)
        settings = dataclasses.replace(llm.settings, num_pages=None, memory_fraction=part)
        llm.settings = settle(settings, llm.model, devices)


def _say(args: argparse.Namespace):
    def say(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    return say


def _load(args: argparse.Namespace, root: Path, model: str | Path | None = None):
    """The LLM of `model`, or of --model, or of the demo."""
    from swiftkv_jax.checkpoint.hf import local_folder
    from swiftkv_jax.engine.llm import LLM

    named: str | Path = model or args.model or _demo(root)
    folder = local_folder(named)
    if folder.parent.name == "snapshots":  # of the hub's cache, named by its commit
        _say(args)(f"files     {named} at commit {folder.name}")
    return LLM(folder, dtype=args.dtype, max_model_len=args.max_model_len, **_given(args, _ENGINE))


def _given(args: argparse.Namespace, flags: Iterable[str]) -> dict:
    """The flags that were given, by their fields' names."""
    names = [flag.replace("-", "_") for flag in flags]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _generate(llm, jobs: list[Job], output: Output | None, args, say) -> int:
    from tqdm import tqdm

    metrics: list[RequestMetrics] = []
    bar = tqdm(total=len(jobs), desc="prompts", disable=args.quiet or not sys.stderr.isatty())
    try:
        with bar:
            for number, result in llm.run([job.request for job in jobs]):
                row = output_row(jobs[number], result)
                if output:
                    output.write(row)
                else:
                    bar.write(_readable(row), file=sys.stdout)
                metrics.append(result.metrics)
                bar.set_postfix_str(f"{llm.stats['output_tokens_per_s']:.1f} output tok/s", refresh=False)
                bar.update()
    except KeyboardInterrupt:
        how = (
            "the same command with --resume does the rest"
            if output and args.output != "-"
            else "nothing is kept"
        )
        print(f"interrupted after {len(metrics)} of {len(jobs)} prompts: {how}", file=sys.stderr)
        return 130
    except OSError as error:
        raise RuntimeError(
            f"cannot write {args.output or 'stdout'} ({error.strerror}); --resume finishes it later"
        ) from error
    finally:
        if output:
            output.close()
    _summary(llm.stats, metrics, say)
    return 0


def _demo(root: Path) -> Path:
    for folder in (root / _DEMO, _DEMO):
        if (folder / "config.json").exists():
            return folder
    raise UsageError(
        f"no demo model in {root / _DEMO}; give --model DIR, a folder with config.json and safetensors"
    )


def _describe(llm, defaults: SamplingParams, name, say) -> None:
    """The start-up lines: what runs, on what, and the defaults in force."""
    import jax

    plan, model = llm.model.plan, llm.model
    kind = f"standard, {plan.num_layers} layers"
    if plan.is_swiftkv:
        split, share = plan.split_and_share
        kind = f"SwiftKV, {plan.num_layers} layers, split {split}, share {share}"
        kind += ", exit head" if model.config.exit_head else ""
    devices = sorted(jax.tree.leaves(llm.params)[0].devices(), key=str)
    where = f"{len(devices)} x {devices[0].device_kind}"
    say(f"model     {name} ({model.config.family}; {kind})")
    say(f"running   {model.dtype} on {where}, context {llm.settings.max_model_len}")
    say(f"cache     {llm.cache_bytes_per_token} bytes per token in {plan.num_rows} rows; {_room(llm)}")
    defaults = defaults.updated({"max_tokens": defaults.max_tokens or DEFAULT_MAX_TOKENS})
    plain = SamplingParams()
    shown = [
        n for n in SamplingParams.names() if getattr(defaults, n) != getattr(plain, n) or n == "temperature"
    ]
    say(f"sampling  {', '.join(f'{n}={getattr(defaults, n)!r}' for n in shown)}")


def _room(llm) -> str:
    """How many tokens the cache holds, at what concurrency, and what a standard model's would."""
    s, plan = llm.settings, llm.model.plan
    tokens = s.num_pages * s.page_size

    full = tokens / s.max_model_len
    text = f"room for {tokens:,} tokens: {full:.1f} sequences of {s.max_model_len}"
    if plan.num_rows == plan.num_layers:
        return text
    return f"{text} (with a row for every layer {full * plan.num_rows / plan.num_layers:.1f})"


def _readable(row: dict) -> str:
    prompt = row["prompt"] if row["prompt"] is not None else row.get("messages", row.get("prompt_token_ids"))
    return f"--- {row['index']} ({row['finish_reason']})\n{prompt} >>>{row['text']}\n"


def _summary(stats: dict, metrics: list[RequestMetrics], say) -> None:
    if not metrics:
        say("nothing to do")
        return
    first = statistics.median(m.ttft for m in metrics) * 1e3
    each = statistics.median(m.tpot for m in metrics) * 1e3
    drafted, accepted = stats["drafted_tokens"], stats["accepted_tokens"]
    guesses = f"{accepted} of {drafted} guesses right; " if drafted else ""
    say(
        f"done: {len(metrics)} prompts in {stats['seconds']:.2f} s, compilation included; "
        f"prompt {stats['prompt_tokens']} tokens, {stats['prompt_tokens_per_s']:.1f} tok/s; "
        f"output {stats['output_tokens']} tokens, {stats['output_tokens_per_s']:.1f} tok/s; "
        f"median TTFT {first:.1f} ms, TPOT {each:.2f} ms; {guesses}"
        f"cache {stats['cache_bytes'] / 2**20:.2f} MiB ({stats['cache_bytes_per_token']} bytes per token)"
    )
