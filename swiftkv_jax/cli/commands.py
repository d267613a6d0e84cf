"""The commands: `swiftkv` and its parts; `train.py` and `swiftkv-train`, `serve.py` and `swiftkv-serve`,
`swiftkv-convert`, and `swiftkv-eval`.

Only this module changes process-wide state: the environment and `jax.config`.
"""

import argparse
import importlib
import os
import re
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax

from swiftkv_jax.common import processes
from swiftkv_jax.common.errors import UsageWarning, exit_code, suggest
from swiftkv_jax.common.folder import private
from swiftkv_jax.version import __version__

_WORTH_KEEPING_S = 0.0  # least compile time of cached programs: all are cached, for a fast second start
HELP = """usage: swiftkv COMMAND ...

  plan MODEL              what each split of a model saves, and what fits on which chip
  distil MODEL --data X   make and train a student; no config file needed
  train --config FILE     the same, with all settings from a config file
  convert MODEL           make a student, or a KV prediction adapter, without training
  slim MODEL --out DIR    store keys or inputs alone (Slim attention), where that loses little
  serve MODEL [--http]    generate a batch, or serve OpenAI's API
  replicas MODEL          several servers of it behind Ray Serve
  kernels MODEL           check and time the kernels of its sizes on this machine; the flags of serve
  eval MODEL --tasks T    EleutherAI's evaluation harness
  eval MODEL --against T  a student's answers beside those of its teacher T
  eval MODEL --files DIR  --tasks ifeval,gsm8k,hellaswag from local files, also against its teacher;
                          --tasks retrieval needs none
  push DIR REPO           upload an export to the Hugging Face hub

swiftkv COMMAND --help lists a command's flags; swiftkv --version prints the version.
"""


def main() -> int:
    """`swiftkv COMMAND ...`, also `python -m swiftkv_jax`; the exit code."""
    name, words = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name in ("-h", "--help", "help"):
        return exit_code(lambda: print(HELP, end=""))
    if name == "--version":
        return exit_code(lambda: print(f"swiftkv-jax {__version__}"))
    if name not in COMMANDS:
        reason = f"no command {name!r}{suggest(name, COMMANDS)}" if name else "which command?"
        print(f"error: {reason}; there are {', '.join(COMMANDS)} (swiftkv --help)", file=sys.stderr)
        return 2
    sys.argv = [f"swiftkv {name}", *expand_model_argument(name, words)]
    return COMMANDS[name]()


def expand_model_argument(name: str, words: list[str]) -> list[str]:
    """The words after a command; a bare MODEL gets the flag that it stands for, where the command needs
    one."""
    if (
        name not in MODEL_FLAGS
        or not words
        or words[0].startswith("-")
        or (name == "eval" and our_eval(words))
    ):
        return words
    return [*MODEL_FLAGS[name](words[0]), *words[1:]]


def our_eval(words: list[str]) -> str:
    """The module of this folder that `eval` means; "" for lm-eval."""
    flags = set(re.split("[ =,]", " ".join(words)))
    if flags & {"--files", "retrieval"} or {"--against", "--tasks"} <= flags:
        return "tasks"
    return "answers" if "--against" in flags else ""


def _run(module: str, compiles: str = "", claims: bool = False, **options: Any) -> int:
    """The exit code of a module's `main`. With the flag `compiles`, for programs of other chips, it uses none
    of this machine; `claims`: it wants most of a GPU's memory."""
    be_quiet()
    if compiles in sys.argv:
        jax.config.update("jax_platforms", "cpu")
        os.environ["TPU_SKIP_MDS_QUERY"] = os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    else:
        cache_programs()
    if claims:
        claim_gpu_memory()
    return importlib.import_module(f"swiftkv_jax.{module}").main(**options)


def _run_with_others(module: str, **options: Any) -> int:
    """`_run` for a command that may be one of several processes of a launcher."""
    code = _run(module, join=lambda wanted: processes.start(wanted, os.environ), **options)
    processes.leave(code)
    return code


def train() -> int:
    """Distil a student; the exit code."""
    return _run_with_others("cli.train", compiles="--compile-only")


def serve() -> int:
    """Generate a batch, or serve HTTP; the exit code."""
    return _run_with_others("server.main", claims=True, api_key=os.environ.get("SWIFTKV_API_KEY"))


def replicas() -> int:
    """Serve replicas behind Ray Serve; the exit code."""
    be_quiet()
    cache_programs()
    claim_gpu_memory()
    from swiftkv_jax.server.ray import main

    settings = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": _WORTH_KEEPING_S,
        "XLA_CLIENT_MEM_FRACTION": os.environ.get("XLA_CLIENT_MEM_FRACTION"),
    }
    environment = {name: str(value) for name, value in settings.items() if value is not None}
    return main(api_key=os.environ.get("SWIFTKV_API_KEY"), environment=environment)


def kernels() -> int:
    """Print the result of the check of a model's kernels, which runs if it has not; the exit code."""
    sys.argv += ["--kernels", "report"]
    return serve()


def evaluate() -> int:
    """Compare two models' answers, run our tasks, or lm-eval on our model; the exit code."""
    if module := our_eval(sys.argv):
        return _run(f"cli.{module}")
    if {"-h", "--help"} & set(sys.argv[1:]):
        ours = [importlib.import_module(f"swiftkv_jax.cli.{name}").parser() for name in ("answers", "tasks")]
        other = "All other --tasks are those of lm-eval, which has help of its own: lm-eval run --help\n"
        return exit_code(lambda: print(*(parser.format_help() for parser in ours), other, sep="\n", end=""))
    if "--version" in sys.argv[1:]:
        return exit_code(lambda: print(f"swiftkv-jax {__version__}"))
    be_quiet()
    try:
        from swiftkv_jax.lm_eval import main
    except ImportError as error:
        own = "ifeval, gsm8k and hellaswag also run without it, from local files (--files)"
        print(f"error: this needs {error.name}: pip install 'swiftkv-jax[eval]'; {own}", file=sys.stderr)
        return 2
    return main()


def be_quiet() -> None:
    """Hide messages that are not for the user, and print warnings about the input as one line."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else it says that PyTorch is missing
    usual = warnings.formatwarning

    def line(message, category, *place, **source) -> str:
        ours = issubclass(category, UsageWarning)
        return f"warning: {message}\n" if ours else usual(message, category, *place, **source)

    warnings.formatwarning = line


def claim_gpu_memory() -> None:
    """Let JAX preallocate the share of GPU memory that --memory-fraction names, not its default of 3/4. A
    setting of JAX's memory allocation in the environment takes precedence."""
    from swiftkv_jax.engine.settings import MEMORY_FRACTION

    settings = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
    if any(name in os.environ for name in settings):
        return
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    reader.add_argument("--memory-fraction", type=float, default=MEMORY_FRACTION)
    try:
        share = reader.parse_known_args(sys.argv[1:])[0].memory_fraction
    except argparse.ArgumentError:  # the command's own parser reports it, with a remedy
        return
    if 0 < share <= 1:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(share)


def cache_programs() -> None:
    """Cache compiled programs where the environment says, or in the user's own cache folder. A folder that
    others can write to is not used, since its contents are executed."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftkv-jax" / "xla"
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)
    if named and "://" in named:  # a bucket: only its owner knows who may write there
        return
    cache = Path(named or default).resolve()
    kept = private(cache)
    jax.config.update("jax_compilation_cache_dir", str(cache) if kept else None)
    if not kept:
        needs = "must be writable by you alone (chmod 700), in a folder that nobody else can rename"
        print(f"warning: no compilation cache: {cache} {needs}", file=sys.stderr)


convert = partial(_run, "cli.convert")
COMMANDS = {
    "plan": partial(_run, "cli.plan", "--compile-serving"),
    "distil": partial(_run, "cli.distil"),
    "train": train,
    "convert": convert,
    "slim": partial(_run, "cli.slim"),
    "serve": serve,
    "replicas": replicas,
    "kernels": kernels,
    "eval": evaluate,
    "push": partial(_run, "cli.push"),
}
MODEL_FLAGS = {
    **dict.fromkeys(("slim", "serve", "replicas", "kernels"), lambda model: ["--model", model]),
    "eval": lambda model: ["--model", "swiftkv", "--model_args", f"pretrained={model}"],
}
