"""Which implementation of a kernel runs: a named one runs or raises, and no name is an answer by platform."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

# In order of preference; the first that supports the call runs. The Hopper kernels and cuDNN are not here:
# they have not run on hardware, and on a GPU a kernel is the default only where it was seen to win.
BY_PLATFORM = {"tpu": ("pallas_tpu", "xla"), "gpu": ("xla",), "cpu": ("native_cpu", "xla")}

PLATFORM_OF = {"native_cpu": "cpu", "pallas_tpu": "tpu", "pallas_gpu": "gpu", "cudnn": "gpu"}
_LOG = logging.getLogger(__name__)


class UnsupportedError(ValueError):
    """A named implementation cannot run this call; one line says what it supports."""


def refuses_nothing(*_, **__) -> str:
    """Of an implementation that supports every call."""
    return ""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A way to compute an operation.

    Attributes:
      run: the function, with the arguments of the operation's `api`.
      refuses: the same arguments -> what of them is not supported and what is, in one line, or "".
    """

    run: Callable[..., Any]
    refuses: Callable[..., str] = refuses_nothing


def device() -> tuple[str, str, int]:
    """(platform, device kind, cores) that code is made for: the abstract mesh's device, else the first one.

    Ahead-of-time compilation names its chip by `jax.sharding.use_abstract_mesh`.
    """
    chip: Any = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return chip.platform, chip.device_kind, getattr(chip, "num_cores", None) or 1


def call(operation: str, table: Mapping[str, Implementation], implementation: str | None, args, kwargs):
    """Run `operation(*args, **kwargs)` by the named implementation, or by the platform's.

    Raises:
      UnsupportedError: an unknown name, a name of another platform, or a call the named one does not support.
    """
    platform, kind, _ = device()
    if implementation is None:
        name = next(n for n in BY_PLATFORM[platform] if n in table and not table[n].refuses(*args, **kwargs))
        _log_choice(operation, name, platform, kind)
        return table[name].run(*args, **kwargs)
    if implementation not in table:
        raise UnsupportedError(f"{operation} has no {implementation!r}; it has {', '.join(table)}")
    needed = PLATFORM_OF.get(implementation, platform)
    if needed != platform:
        here = [n for n in table if PLATFORM_OF.get(n, platform) == platform]
        raise UnsupportedError(
            f"{operation}: {implementation} needs a {needed}, this is {platform}: {', '.join(here)}"
        )
    if reason := table[implementation].refuses(*args, **kwargs):
        raise UnsupportedError(f"{operation}: {implementation} does not support {reason}")
    return table[implementation].run(*args, **kwargs)


@functools.cache
def _log_choice(operation: str, name: str, platform: str, kind: str) -> None:
    """Cached, so that each choice is logged once."""
    _LOG.info("%s runs as %s on %s (%s)", operation, name, platform, kind)


def expect(**pairs) -> None:
    """Each keyword names two shapes that must agree, or arrays: `q_and_k=(q.shape[-1:], k.shape[-1:])`.

    An array that is None is not there, and agrees with anything.

    Raises:
      UnsupportedError: two that do not, by name.
    """
    for name, pair in pairs.items():
        if any(x is None for x in pair):
            continue
        one, other = (tuple(getattr(x, "shape", x)) for x in pair)
        if one != other:
            first, _, second = name.partition("_and_")
            raise UnsupportedError(f"{first} has {one} where {second} has {other}")


def divisor(number: int, most: int, multiple: int = 1) -> int:
    """The largest divisor of `number` that is a multiple of `multiple` and at most `most`; 0 if none."""
    found = (d for d in range(1, min(number, most) + 1) if number % d == 0 and d % multiple == 0)
    return max(found, default=0)
