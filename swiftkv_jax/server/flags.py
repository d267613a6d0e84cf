"""The flags of `serve.py --http`, and how a flag is made from a field of settings."""

import argparse
import dataclasses
import ipaddress
import re
from pathlib import Path
from typing import Any

from swiftkv_jax.common.checks import above, choice, type_of
from swiftkv_jax.common.errors import Parser, UsageError, explained
from swiftkv_jax.common.folder import model_name
from swiftkv_jax.server.settings import REFUSALS, HttpSettings

DEFAULT = "127.0.0.1:8000"
_LIMITS = {  # flag: (field of HttpSettings, help)
    "max-queued-requests": ("max_queued_requests", "requests that may wait (default {})"),
    "max-queued-tokens": ("max_queued_tokens", "prompt tokens that may wait (default: 64 steps' worth)"),
    "max-queued-output-tokens": (
        "max_queued_output_tokens",
        "output tokens of waiting requests (default: 64 contexts)",
    ),
    "shutdown-timeout": ("shutdown_s", "seconds for running requests to finish on SIGTERM (default {:g})"),
    "queue-timeout": ("queue_timeout_s", "seconds that a request may wait in the queue (default {:g})"),
    "max-requests-per-key": (
        "max_requests_per_key",
        "running and waiting requests of a key (default: half, if several)",
    ),
    "max-scored-tokens": ("max_scored_tokens", "longest prompt to score with echo (default {})"),
    "metrics-prefix": ("metrics_prefix", "prefix of metric names (default {}; vLLM's is vllm:)"),
}


class Hidden:
    """A group of flags that are accepted, but not shown in --help."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._parser = parser

    def add_argument(self, *names: str, **options: Any) -> None:
        options["help"] = argparse.SUPPRESS
        self._parser.add_argument(*names, **options)


def add_flag(group, flag: str, owner: type, text: str, name: str = "") -> None:
    """Add the flag of a dataclass's field `name`, with the field's type; its default replaces {} in `text`.

    A flag that is not given is None, so that the field's default applies.
    """
    field = next(f for f in dataclasses.fields(owner) if f.name == (name or flag.replace("-", "_")))
    kind_of_field = type_of(field)
    if kind_of_field is bool:
        group.add_argument(f"--{flag}", action="store_const", const=True, help=text)
        return
    kind = next(kind for kind in (int, float, str) if kind_of_field in (kind, kind | None))
    metavar = {int: "N", float: "X", str: "NAME"}[kind]
    group.add_argument(f"--{flag}", type=kind, metavar=metavar, help=text.format(field.default))


def add_flags(parser: Parser, shown: bool) -> None:
    """Add the group "server"; unless `shown`, --help lists only --http."""
    group = parser.add_argument_group("server")
    about = f"serve OpenAI's API (default {DEFAULT}); see --http --help"
    parser.flag("--http HOST:PORT", about, group, nargs="?", const=DEFAULT)
    p = group if shown else Hidden(parser)
    parser.flag("--served-model-name NAME", "the model's name in the API (default: the folder's)", p)
    parser.flag("--compare DIR", "a second model beside the first; the page at / shows both", p)
    about = "API keys, one per line; unlike --api-key, not visible in `ps`"
    parser.flag("--api-key-file FILE", about, p)
    about = "file with a key for /metrics; needed if there are several API keys"
    parser.flag("--metrics-key-file FILE", about, p)
    about = "API key for all routes but /health and /ready; may be repeated"
    parser.flag("--api-key KEY", about, p, action="append")
    parser.flag("--insecure", "accept calls from other machines without a key", p)
    parser.flag("--no-warm-up", "compile on first use: the first requests are slow", p)
    parser.flag("--show-template", "show the chat template in /tokenizer_info", p)
    parser.flag("--busy-status N", "status of refusals: 429, 503 or 529 (default: by reason)", p, type=int)
    for flag, (name, text) in _LIMITS.items():
        add_flag(p, flag, HttpSettings, text, name)


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, HOST, :PORT or PORT; IPv6 hosts stand in brackets."""
    if "/" in text:
        raise UsageError(f"--http takes HOST:PORT, not {text!r}; a model: swiftkv serve MODEL --http")
    host, colon, port = text.rpartition(":")
    if not colon and text.isdecimal():
        host, port = "", text
    elif not colon or text.endswith("]"):
        host, port = text, DEFAULT.rpartition(":")[2]
    if not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise UsageError(f"--http must be HOST:PORT, such as {DEFAULT}, not {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def http_settings(args: argparse.Namespace, model: str, api_key: str | None) -> HttpSettings:
    """The settings from the flags; `api_key` is one more key, from the environment."""
    keys = [*(args.api_key or ()), *_file_keys("api", args.api_key_file), *([api_key] if api_key else ())]
    keys = [key.strip() for key in keys]  # a file or a secret often ends with a newline
    metrics = _file_keys("metrics", args.metrics_key_file)
    if any(not key or not key.isascii() or not key.isprintable() for key in [*keys, *metrics]):
        raise UsageError("--api-key, and the keys in files, must be printable ASCII text, not empty")
    if len(metrics) > 1 or set(metrics) & set(keys):
        raise UsageError("--metrics-key-file must hold one key, and none of the API keys")
    host = address(args.http)[0]
    if not is_loopback(host) and not keys and not args.insecure:
        advice = "pass --api-key KEY or --api-key-file FILE, listen on 127.0.0.1, or pass --insecure"
        raise UsageError(f"{host} can be reached by others and no key is set: {advice}")
    values = {flag: getattr(args, flag.replace("-", "_")) for flag in _LIMITS}
    for flag, value in values.items():
        if isinstance(value, int | float):
            above(f"--{flag}", value, 0)
    prefix = args.metrics_prefix
    if prefix is not None and not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
        raise UsageError(f"--metrics-prefix must be letters, digits, _ and :, such as vllm:, not {prefix!r}")
    limits = {field: values[flag] for flag, (field, _) in _LIMITS.items() if values[flag] is not None}
    if args.busy_status is not None:
        choice("--busy-status", args.busy_status, REFUSALS)
        limits |= {"queue_status": args.busy_status, "key_status": args.busy_status}
    return HttpSettings(
        model_name=args.served_model_name or model_name(model),
        api_keys=tuple(keys),
        metrics_key=metrics[0] if metrics else None,
        warm_up=not args.no_warm_up,
        show_template=args.show_template,
        **limits,
    )


def _file_keys(kind: str, path: str | None) -> list[str]:
    if path is None:
        return []
    with explained(f"read --{kind}-key-file {path}"):
        lines = Path(path).read_text(encoding="ascii", errors="replace").split()
    if not lines:
        raise UsageError(f"--{kind}-key-file {path} holds no key")
    return lines
