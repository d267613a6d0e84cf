"""The command line of serve.py and swiftkv-serve: prompts in, completions out; or the HTTP server."""

import argparse
import contextlib
import signal
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import jax

from swiftkv_jax.analysis.flops import cache_bytes_per_token
from swiftkv_jax.common import processes
from swiftkv_jax.common.checks import choice
from swiftkv_jax.common.errors import Parser, UsageError, UsageWarning, exit_code
from swiftkv_jax.common.folder import DEMO, model_name
from swiftkv_jax.common.progress import LIVE, pause, ticking, working
from swiftkv_jax.config.quantization import CHOICES
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.sharding import make_mesh, mesh_axes
from swiftkv_jax.engine import speech
from swiftkv_jax.engine.request import RequestMetrics, SamplingParams
from swiftkv_jax.engine.settings import CACHE_DTYPES, Settings, share_of
from swiftkv_jax.server import flags as http
from swiftkv_jax.server.jobs import (
    DEFAULT_MAX_TOKENS,
    PROMPTS,
    Job,
    Output,
    OutputError,
    answered,
    make_jobs,
    output_row,
    read_lines,
)
from swiftkv_jax.server.settings import TELL_S, HttpSettings

_DEMO = DEMO / "teacher"
_ENGINE = {  # flag: help; fields of engine.Settings, with their types and defaults
    "max-model-len": "context length in tokens (default: the model's)",
    "max-source-len": "most positions that an encoder reads (default: its context)",
    "max-num-seqs": "most sequences that run at once (default {})",
    "max-num-batched-tokens": "most tokens in one step (default {})",
    "steps-per-launch": "tokens decoded before a new request can start (default {})",
    "page-size": "tokens per cache page (default {}; 128 for 8-bit rows on a TPU)",
    "num-pages": "pages in the cache (default: as many as fit in memory)",
    "memory-fraction": "share of the device's memory for weights and cache (default {})",
    "cache-dtype": f"auto, {', '.join(CACHE_DTYPES)} (default {{}})",
    "kernels": "auto (chosen by a check on this machine), xla, NAMES, or report",
    "drafts": "draft tokens verified at once (default {})",
    "drafter": "source of drafts: prompt, or exit (the exit head) (default {})",
    "batch-invariant": "answers do not depend on other requests; slower",
    "exit-threshold": "lossy: accept exit-head tokens above X unverified (default off)",
}
_SAMPLING = {  # flag: help; fields of SamplingParams
    "max-tokens": f"most tokens to generate (default {DEFAULT_MAX_TOKENS}, or what the context leaves)",
    "temperature": "0 is greedy",
    "top-k": "keep the k most likely tokens; 0 keeps all",
    "top-p": "keep the most likely tokens whose probabilities sum to p",
    "min-p": "keep tokens at least p times as likely as the most likely one",
    "repetition-penalty": "above 1: repeated tokens become less likely",
}


def build_parser(server: bool = True) -> Parser:
    """All flags of serve.py; --help shows those of the HTTP server if `server`, else those of a batch."""
    p = Parser(
        usage="%(prog)s [--model DIR] [--input FILE] [--output FILE] [flags], or %(prog)s --http [flags]",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=32, width=100),
        epilog="Flags override generation_config.json; an input line overrides both: "
        '{"prompt": "...", "seed": 9}.',
        allow_abbrev=False,
    )
    batch = http.Hidden(p) if server else p
    p.flag("--model DIR", "folder or hub id (default: the demo's teacher)")
    p.flag("--base DIR", "base model of a KV prediction adapter, if it has moved")
    p.flag("--input FILE", ".jsonl of {prompt | messages | audio}, .txt, or - for stdin", batch)
    p.flag("--output FILE", ".jsonl, or - for stdout (default: readable text on stdout)", batch)
    p.flag("--resume", "finish the --output of an interrupted run", batch)
    p.flag("--skip-bad-lines", "skip invalid input lines", batch)
    p.flag("--quiet", "print only errors to stderr")
    about = "one model over all processes of a launcher"
    p.flag("--distributed", about, action=argparse.BooleanOptionalAction)
    sampling = p.add_argument_group("sampling")
    for flag, text in _SAMPLING.items():
        http.add_flag(sampling, flag, SamplingParams, text)
    p.flag("--stop TEXT", "stop before TEXT; may be repeated", sampling, action="append")
    p.flag("--seed N", "line i samples with seed N + i (default 0)", sampling, type=int, default=0)
    engine = p.add_argument_group("engine")
    about = "auto, float32, bfloat16 or float16 (default: the checkpoint's)"
    p.flag("--dtype D", about, engine, default="auto")
    p.flag("--tensor-parallel-size N", "devices to split the heads over (default 1)", engine, type=int)
    p.flag("--mesh AXES", "mesh over all devices, such as fsdp=2,tensor=4", engine)
    about = "off: serve a Slim attention --model as keys and values (default on)"
    p.flag("--slim on|off", about, engine, default="on")
    about = "8-bit weights: int8, fp8, dequantize, or auto: as they are stored (default auto)"
    p.flag("--quantization NAME", about, engine, default="auto")
    about = "also round what 8-bit weights are multiplied with to 8 bits, by token"
    p.flag("--eight-bit-activations", about, engine)
    for flag, text in _ENGINE.items():
        http.add_flag(engine, flag, Settings, text)
    http.add_flags(p, server)
    return p


def main(
    argv: list[str] | None = None,
    api_key: str | None = None,
    join: Callable[[bool | None], object] | None = None,
) -> int:
    """Run; `api_key` is one more key for the server.

    Exit code 0, 2 for bad usage, 1 for a failure, 130 for Ctrl-C.

    Args:
      join: is called with --distributed before JAX is used. None: the caller has done what is needed.
    """

    def run() -> int:
        args = build_parser("--http" in (sys.argv if argv is None else argv)).parse_args(argv)
        choice("--slim", args.slim, ("on", "off"))
        choice("--quantization", args.quantization, CHOICES[1:])
        if args.kernels == "report":
            return _report(args)
        if join is not None:
            join(args.distributed)
        with processes.reporting_lost_peers():
            return _serve(args, api_key) if args.http else _run(args)

    return exit_code(run, failures=(OutputError, processes.PeerLost))


def _report(args: argparse.Namespace) -> int:
    """Check the kernels of the model's calls, unless that was done before; print the result for each."""
    from swiftkv_jax.kernels.check.decide import table

    args.kernels = "auto"
    chosen = _choose(args)
    if chosen.decision is None:
        print(f"nothing to check: {chosen.how} (a GPU or a TPU that JAX can use was not found)")
    else:
        print(table(chosen.decision))
    return 0


def _run(args: argparse.Namespace) -> int:
    if args.resume and args.output in (None, "-"):
        raise UsageError("--resume needs --output FILE: the file to finish")
    if args.compare:
        raise UsageError("--compare is for --http, not for a batch")
    _agree(args)
    with processes.together():
        lines = read_lines(args.input) if processes.is_first() else []
    flags = _given(args, (*_SAMPLING, "stop"))
    SamplingParams().updated(flags)  # a bad flag is found before the model is loaded
    say = _say(args)
    with working(say, f"loading   {args.model or _DEMO}", TELL_S):
        llm = _load(args)
    if not processes.is_first():
        return _follow(llm)
    with _leading(llm):
        defaults = llm.defaults.updated({"max_tokens": None})
        defaults = (speech.GREEDY if speech.takes_audio(llm) else defaults).updated(flags)
        _describe(llm, defaults, args.model or _DEMO, say)
        beside = Path(args.input).parent if args.input not in (None, "-") else Path()
        jobs = make_jobs(lines, defaults, args.seed, llm, args.skip_bad_lines, say, beside)
        output = Output(args.output, args.resume, jobs) if args.output else None
        left = output.left if output else jobs
        if len(left) < len(jobs):
            say(f"{len(jobs) - len(left)} of {len(jobs)} prompts are done already in {args.output}")
        return _generate(llm, left, output, args, say)


def server_settings(args: argparse.Namespace, api_key: str | None) -> tuple[HttpSettings, dict]:
    """The server's settings and sampling defaults from the flags, before anything is loaded."""
    batch = ("input", "output", "resume", "skip_bad_lines", "max_tokens", "stop")
    wrong = [f"--{name.replace('_', '-')}" for name in batch if getattr(args, name)]
    if wrong:
        raise UsageError(f"{', '.join(wrong)}: for a batch, not for --http")
    sampling = _given(args, _SAMPLING)
    SamplingParams().updated(sampling)
    settings = http.http_settings(args, str(args.model or _DEMO), api_key)
    if args.compare and model_name(args.compare) == settings.model_name:
        name = settings.model_name
        raise UsageError(f"--compare: both models are called {name!r}; name the first by --served-model-name")
    return settings, sampling


def make_api(args: argparse.Namespace, settings: HttpSettings, sampling: dict):
    """Load the model, and --compare's, and make OpenAI's API for them."""
    from swiftkv_jax.server.app import Api

    folders: dict[str, str | None] = {settings.model_name: None}
    folders |= {model_name(args.compare): args.compare} if args.compare else {}
    say = _say(args)
    with working(say, f"loading   {' and '.join(folders)}", TELL_S):
        llms = _loaded(args, folders, sampling)
    for name, llm in llms.items():
        _describe(llm, llm.defaults, name, say)
    with working(say, "making    the engine and its cache", TELL_S):
        return Api(llms.pop(settings.model_name), settings, llms)


def _serve(args: argparse.Namespace, api_key: str | None) -> int:
    """Serve OpenAI's API until a signal; sampling flags are the server's defaults."""
    settings, sampling = server_settings(args, api_key)
    try:
        from swiftkv_jax.server import server
    except ImportError as error:
        raise UsageError(f"--http needs {error.name}: pip install 'swiftkv-jax[serve]'") from error

    _agree(args)
    with processes.together():
        listener = server.listen(*http.address(args.http)) if processes.is_first() else None
    if listener is None:
        return _follow(_loaded(args, {settings.model_name: None}, sampling)[settings.model_name])
    with listener:
        api = make_api(args, settings, sampling)
        host, port = listener.getsockname()[:2]
        keys = f"{len(settings.api_keys)} API keys" if settings.api_keys else "no API key"
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        names = ", ".join(api.models.by_name)
        _say(args)(f"listening {where} ({names}; {keys}); chat and compare at {where}/")
        with _leading(api.models.by_name[settings.model_name].llm):
            return server.run(api, listener, args.quiet)


def _agree(args: argparse.Namespace) -> None:
    """With several processes: choose kernels in process 0 for all, and check that flags are the same
    everywhere."""
    if not jax.distributed.is_initialized():
        return
    _choose(args)  # before JAX has its devices
    processes.check_same("the command line", repr(sorted(vars(args).items())))
    args.quiet |= not processes.is_first()
    count, devices = jax.process_count(), jax.device_count()
    if count > 1 and not args.mesh and (args.tensor_parallel_size or 1) < devices:
        used = f"{args.tensor_parallel_size or 1} of the {devices} devices of {count} processes"
        advice = f"--tensor-parallel-size {devices} or --mesh, or --no-distributed for a server in each"
        raise UsageError(f"the model would lie on {used}: give {advice}")
    if count > 1 and args.compare:
        raise UsageError("--compare serves two models in one process; leave it out, or give --no-distributed")


def _follow(llm) -> int:
    """Run a process after the first: it ignores signals, and ends when process 0 says so."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    llm.follow()
    return 0


@contextlib.contextmanager
def _leading(llm) -> Iterator[None]:
    """A context in process 0: the others follow until it ends."""
    if llm.role.several:  # JAX's runtime keeps SIGTERM for itself
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        llm.dismiss()


def _loaded(args: argparse.Namespace, folders: dict[str, str | None], flags: dict) -> dict:
    """The LLMs of a server, by name; None is --model, or the demo's."""
    for folder in folders.values() if len(folders) > 1 else ():  # for all, before the first takes the device
        _choose(args, folder)
    llms = {name: _load(args, folder) for name, folder in folders.items()}
    share = len(llms) if args.num_pages is None else 1
    return {name: for_server(llm, flags, share) for name, llm in llms.items()}


def for_server(llm, flags: dict, share: int):
    """`llm` with the server's defaults. Its cache takes one of `share` parts of the device memory that the
    weights of all models leave."""
    settings = {}
    if share > 1:
        device, used = llm.devices[0], 0.0
        if "bytes_limit" in (stats := device.memory_stats() or {}):
            used = share_of(device) * stats["bytes_in_use"] / stats["bytes_limit"]
        part = used + (llm.settings.memory_fraction - used) / share
        settings["memory_fraction"] = part
    return llm.replace(llm.defaults.updated(flags), **settings)


def _say(args: argparse.Namespace):
    def say(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    return say


def _choose(args: argparse.Namespace, model: str | None = None):
    """The kernels of an LLM of `model`, while JAX has no devices yet."""
    from swiftkv_jax.engine.validate import choose_kernels

    settings = _loading(args, model)
    if args.mesh:
        settings["tensor_parallel_size"] = mesh_axes(args.mesh).get("tensor", 1)
        if settings["tensor_parallel_size"] < 1:
            why = "kernels are chosen for each one's share of the heads, before JAX counts the devices"
            raise UsageError(f"--mesh {args.mesh}: give tensor a number of devices; {why}")
    return choose_kernels(model or args.model or _DEMO, **settings)


def _load(args: argparse.Namespace, model: str | None = None):
    """The LLM of `model`, or of --model, or of the demo."""
    from swiftkv_jax.checkpoint.hf import local_folder
    from swiftkv_jax.engine.llm import LLM

    named = model or args.model or _DEMO
    folder = local_folder(named)
    if folder.parent.name == "snapshots":  # in the hub's cache, named by its commit
        _say(args)(f"files     {named} at commit {folder.name}")
    with warnings.catch_warnings():
        if args.quiet:
            warnings.simplefilter("ignore", UsageWarning)
        if args.mesh:
            _choose(args, model)
        mesh = make_mesh(**mesh_axes(args.mesh)) if args.mesh else None
        settings = {"quantization": args.quantization, "eight_bit_activations": args.eight_bit_activations}
        return LLM(folder, mesh=mesh, **settings | _loading(args, model))


def _loading(args: argparse.Namespace, model: str | None) -> dict:
    """The arguments of an LLM that its kernels depend on; --slim and --base are of --model alone."""
    slim, base = (True, None) if model else (args.slim == "on", args.base)
    own = {"dtype": args.dtype, "slim": slim, "base": base}
    return own | _given(args, (*_ENGINE, "tensor-parallel-size"))


def _given(args: argparse.Namespace, flags: Iterable[str]) -> dict:
    """The flags that were given, by their fields' names."""
    names = [flag.replace("-", "_") for flag in flags]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _generate(llm, jobs: list[Job], output: Output | None, args, say) -> int:
    from tqdm import tqdm

    metrics: list[RequestMetrics] = []
    failed: list[str] = []
    bar = tqdm(total=len(jobs), desc="prompts", disable=args.quiet or not sys.stderr.isatty())

    def tell(seconds: float) -> None:
        """Count the seconds on a terminal; in a log say how far it is."""
        if bar.disable:
            say(f"progress  {len(metrics)} of {len(jobs)} prompts, {seconds:.0f} s so far")
        else:
            bar.refresh()

    every = partial(pause, say) if bar.disable else lambda seconds: LIVE
    try:
        with ticking(tell, every), bar:
            for job, result in answered(llm, jobs):
                row = output_row(job, result)
                if output:
                    output.write(row)
                else:
                    prompt = next(row[name] for name in PROMPTS if row.get(name) is not None)
                    answer = f"{prompt} >>>{row.get('error') or row['text']}"
                    bar.write(f"--- {row['index']} ({row['finish_reason']})\n{answer}\n", file=sys.stdout)
                metrics.append(result.metrics)
                failed += [each.error or "" for each in result.outputs if each.finish_reason == "error"][:1]
                bar.set_postfix_str(f"{llm.stats['output_tokens_per_s']:.1f} output tok/s", refresh=False)
                bar.update()
        if output and (why := output.sort()):
            say(f"note      answers are in the order in which they came, by index of the input ({why})")
    except KeyboardInterrupt:
        kept = output and args.output != "-"
        advice = "run the same command with --resume to finish" if kept else "nothing is kept"
        print(f"interrupted after {len(metrics)} of {len(jobs)} prompts: {advice}", file=sys.stderr)
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError) and args.output in (None, "-"):
            raise
        later = "; --resume finishes it later" if output and Path(args.output).is_file() else ""
        raise OutputError(f"cannot write {args.output or 'stdout'} ({error.strerror}){later}") from error
    finally:
        if output:
            output.close()
    _summary(llm.stats, metrics, say)
    if failed:
        print(f"error: {len(failed)} of {len(metrics)} prompts failed: {failed[0]}", file=sys.stderr)
    return int(bool(failed))


def _describe(llm, defaults: SamplingParams, name, say) -> None:
    """Print the start-up lines: what runs, on what, and the defaults in force."""
    plan, model = llm.model.plan, llm.model
    kind = plan.description + (", exit head" if model.config.exit_head else "")
    where = f"{len(llm.devices)} x {llm.devices[0].device_kind}"
    say(f"model     {name} ({model.config.family}; {kind})")
    own, *auxiliary = llm.pool_bytes_per_token
    apart = ""
    if isinstance(model, Predicted):
        aux, tail = model.auxiliary, model.prediction.tail
        size = f"{aux.config.family}; {aux.plan.num_layers} layers of width {aux.config.hidden_size}"
        say(f"prompts   read by an auxiliary ({size}) but for the last {tail} token{'s' * (tail > 1)}")
        apart = f", {own} of them the model's and {sum(auxiliary)} the auxiliary's"
    stored_in = "" if model.dtype == model.config.dtype else f" (the checkpoint is in {model.config.dtype})"
    say(f"running   {model.dtype}{stored_in} on {where}, context {llm.settings.max_model_len}")
    names = dict(llm.kernels)
    origin = names.pop("how")
    say(f"kernels   {', '.join(f'{kind} {name}' for kind, name in names.items())} ({origin})")
    stored = model.dtype if llm.settings.cache_dtype == "auto" else llm.settings.cache_dtype
    forms = [row.form for row in plan.named.rows]
    each = ", ".join(f"{forms.count(form)} as {form}" for form in dict.fromkeys(forms))
    kept = f", {each}" if plan.forms != ("kv",) else ""
    rows = f"{plan.num_rows} rows{kept}{apart}"
    s, standard = llm.settings, cache_bytes_per_token(model.config, None, stored)
    tokens = s.num_pages * s.page_size
    full = tokens / s.max_model_len
    room = f"room for {tokens:,} tokens in pages of {s.page_size}: {full:.1f} sequences of {s.max_model_len}"
    if llm.cache_bytes_per_token != standard:
        room += f" (a standard model's cache: {full * llm.cache_bytes_per_token / standard:.1f})"
    say(f"cache     {llm.cache_bytes_per_token} bytes per token in {rows}; {room}")
    most = None if speech.takes_audio(llm) else DEFAULT_MAX_TOKENS
    defaults = defaults.updated({"max_tokens": defaults.max_tokens or most})
    plain = SamplingParams()
    shown = [
        n for n in SamplingParams.names() if getattr(defaults, n) != getattr(plain, n) or n == "temperature"
    ]
    say(f"sampling  {', '.join(f'{n}={getattr(defaults, n)!r}' for n in shown)}")


def _summary(stats: dict, metrics: list[RequestMetrics], say) -> None:
    if not metrics:
        say("nothing to do")
        return
    first = [1e3 * m.ttft for m in metrics if m.ttft is not None]
    each = [1e3 * m.tpot for m in metrics if m.tpot is not None]
    median, times = statistics.median, "no token came"
    if first:
        times = f"median TTFT {median(first):.1f} ms, TPOT {median(each):.2f} ms"
    drafted, accepted = stats["drafted_tokens"], stats["accepted_tokens"]
    ahead = f" ({stats['auxiliary_tokens']} of them by the auxiliary)" if stats["auxiliary_tokens"] else ""
    guesses = f"{accepted} of {drafted} draft tokens accepted; " if drafted else ""
    say(
        f"done: {len(metrics)} prompts in {stats['seconds']:.2f} s, compilation included; "
        f"prompt {stats['prompt_tokens']} tokens{ahead}, {stats['prompt_tokens_per_s']:.1f} tok/s; "
        f"output {stats['output_tokens']} tokens, {stats['output_tokens_per_s']:.1f} tok/s; "
        f"{times}; {guesses}"
        f"cache {stats['cache_bytes'] / 2**20:.2f} MiB ({stats['cache_bytes_per_token']} bytes per token)"
    )
