"""The flags of `serve.py --http`. Imports nothing heavy."""

import argparse
import ipaddress
import math
import re
from pathlib import Path

from swiftkv_jax.engine.http.settings import REFUSALS, HttpSettings
from swiftkv_jax.errors import UsageError

DEFAULT = "127.0.0.1:8000"
QUEUED_REQUESTS = 256
_QUEUES = {  # flag: help; how much may wait, fields of the engine's settings
    "max-queued-requests": f"(default {QUEUED_REQUESTS})",
    "max-queued-tokens": "of prompts (default: 64 steps' worth)",
    "max-queued-output-tokens": "that these may ask for, max_tokens times n (default: 64 contexts)",
}
_LIMITS = {  # flag: (type, field of HttpSettings, help)
    "shutdown-timeout": (float, "shutdown_s", "seconds that running requests get on SIGTERM (default 30)"),
    "queue-timeout": (float, "queue_timeout_s", "seconds that a request may wait for a place (default 120)"),
    "max-requests-per-key": (
        int,
        "max_requests_per_key",
        "running or waiting (default: with several keys, half of all places)",
    ),
    "max-scored-tokens": (int, "max_scored_tokens", "longest prompt to score with echo (default 4096)"),
    "metrics-prefix": (str, "metrics_prefix", "of metric names (default swiftkv_; vllm: suits their boards)"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The group "server"."""
    p = parser.add_argument_group("server")
    p.add_argument(
        "--http",
        nargs="?",
        const=DEFAULT,
        metavar="HOST:PORT",
        help=f"serve OpenAI's API instead of a batch (default {DEFAULT})",
    )
    p.add_argument("--served-model-name", metavar="NAME", help="(default: the folder's name)")
    p.add_argument(
        "--compare", metavar="DIR", help="a second model beside the first; the page at / shows both"
    )
    p.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="asked for on every route but /health; may be repeated",
    )
    p.add_argument(
        "--api-key-file", metavar="FILE", help="one key a line; unlike --api-key, not seen by `ps`"
    )
    p.add_argument("--insecure", action="store_true", help="let others than this machine call without a key")
    p.add_argument(
        "--no-warm-up", action="store_true", help="compile when needed: the first requests are slow"
    )
    p.add_argument("--show-template", action="store_true", help="/tokenizer_info gives the chat template")
    p.add_argument(
        "--busy-status",
        type=int,
        metavar="N",
        help="of refusals: 429, 503 or 529 (default: 429 by key, 503 of the queue)",
    )
    for flag, text in _QUEUES.items():
        p.add_argument(f"--{flag}", type=int, metavar="N", help=text)
    for flag, (kind, _, text) in _LIMITS.items():
        p.add_argument(f"--{flag}", type=kind, metavar="X" if kind is float else "N", help=text)


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, HOST, or :PORT; IPv6 hosts stand in brackets.

    Raises:
      UsageError: it is none of these.
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, DEFAULT.rpartition(":")[2]
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--http must be HOST:PORT, such as {DEFAULT}, not {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def http_settings(args: argparse.Namespace, model: str, api_key: str | None) -> HttpSettings:
    """The settings that the flags ask for; `api_key` is one more key, from the environment.

    Raises:
      UsageError: a limit makes no sense, or the server would be open to strangers.
    """
    keys = [*(args.api_key or ()), *_file_keys(args.api_key_file), *([api_key] if api_key else ())]
    if any(not key.strip() or not key.isascii() for key in keys):
        raise UsageError("--api-key must be printable ASCII text, not empty")
    host = address(args.http)[0]
    if not is_loopback(host) and not keys and not args.insecure:
        raise UsageError(
            f"{host} can be reached by others and no key is set: pass --api-key KEY or --api-key-file FILE, "
            "listen on 127.0.0.1, or pass --insecure"
        )
    given = {flag: getattr(args, flag.replace("-", "_")) for flag in (*_LIMITS, *_QUEUES)}
    for flag, value in given.items():
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise UsageError(f"--{flag} must be a number above 0, not {value}")
    prefix = args.metrics_prefix
    if prefix is not None and not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
        raise UsageError(f"--metrics-prefix must be letters, digits, _ and :, such as vllm:, not {prefix!r}")
    limits = {field: given[flag] for flag, (_, field, _) in _LIMITS.items() if given[flag] is not None}
    if args.busy_status is not None:
        if args.busy_status not in REFUSALS:
            known = ", ".join(map(str, REFUSALS))
            raise UsageError(f"--busy-status must be one of {known}, not {args.busy_status}")
        limits |= {"queue_status": args.busy_status, "key_status": args.busy_status}
    return HttpSettings(
        model_name=args.served_model_name or model_name(model),
        api_keys=tuple(keys),
        warm_up=not args.no_warm_up,
        show_template=args.show_template,
        **limits,
    )


def model_name(folder: str) -> str:
    """A folder's name; for `runs/mine/export`, where training puts a student, that of the run."""
    path = Path(folder)
    return (path.parent.name if path.name == "export" else path.name) or "model"


def compared_name(folder: str, first: str) -> str:
    """What the second model is called.

    Raises:
      UsageError: as the first.
    """
    name = model_name(folder)
    if name == first:
        raise UsageError(f"--compare: both models are called {name!r}; name the first by --served-model-name")
    return name


def queue_bounds(args: argparse.Namespace, budget: int, context: int) -> dict[str, int]:
    """Engine settings: what may wait. `budget` tokens a step; one whole context may always wait."""
    return {
        "max_queued_requests": args.max_queued_requests or QUEUED_REQUESTS,
        "max_queued_tokens": args.max_queued_tokens or max(64 * budget, 4 * context),
        "max_queued_output_tokens": args.max_queued_output_tokens or 64 * context,
    }


def _file_keys(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(path).read_text(encoding="ascii").split()
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot read --api-key-file {path}: {error}") from error
    if not lines:
        raise UsageError(f"--api-key-file {path} holds no key")
    return lines
