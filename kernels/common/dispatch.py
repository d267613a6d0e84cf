"""Choice of a kernel's implementation: a named one runs or raises; None means the platform's choice."""

import dataclasses
import functools
import importlib
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

# In order of preference; the first that supports the call runs. On GPUs and TPUs only XLA's and JAX's own are
# listed. Others run by name only; kernels/check names those that were right on the same machine.
BY_PLATFORM = {
    "tpu": ("xla_one_turn", "xla_groups", "xla"),
    "gpu": ("xla_one_turn", "mosaic_groups", "xla"),
    "cpu": ("native_cpu", "xla"),
}

PLATFORM_OF = {"native_cpu": "cpu", "pallas_tpu": "tpu", "splash": "tpu"}
PLATFORM_OF |= dict.fromkeys(("pallas_gpu", "cudnn", "mosaic_groups"), "gpu")
_HOPPER = ("pallas_gpu", "mosaic_groups")  # its WGMMA is on no GPU before or after Hopper
BIASED = ("reference", "xla", "xla_one_turn")  # what takes a bias by distance, or a soft cap
_LOG = logging.getLogger(__name__)


class UnsupportedError(ValueError):
    """A named implementation cannot run this call; one line says what it supports."""


@dataclasses.dataclass(frozen=True)
class ByKind:
    """Names of an attention's implementations, by kind of call; None: the platform's choice.

    Attributes:
      decode: for blocks of at most `FEW` queries. chunk: for longer blocks, of prompts.
    """

    FEW = 16

    decode: str | None = None
    chunk: str | None = None

    def of(self, queries: int) -> str | None:
        """The name for blocks of so many queries."""
        return self.decode if queries <= self.FEW else self.chunk


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A way to compute an operation.

    Attributes:
      run: the function, with the arguments of the operation's `api`.
      refuses: the same arguments -> in one line what of the call is not supported and what is, or "".
    """

    run: Callable[..., Any]
    refuses: Callable[..., str] = lambda *_, **__: ""

    @classmethod
    def of(cls, module: str, run: str, refuses: str = "refuses") -> "Implementation":
        """Functions of a module that the first call imports: Pallas takes a quarter of a second, and most
        processes run none of it."""

        def later(name: str) -> Callable[..., Any]:
            return lambda *args, **kwargs: getattr(importlib.import_module(module), name)(*args, **kwargs)

        return cls(later(run), later(refuses))


def device() -> tuple[str, str, int]:
    """(platform, device kind, cores) to compile for: the abstract mesh's device, else the first one.

    Ahead-of-time compilation names its chip by `jax.sharding.use_abstract_mesh`.
    """
    chip: Any = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return chip.platform, chip.device_kind, getattr(chip, "num_cores", None) or 1


def static_loops(asked: bool | None) -> bool:
    """Whether to avoid loops whose length is known only at run time in XLA implementations. None: on GPUs and
    TPUs, where each iteration of such a loop waits for the host."""
    return device()[0] != "cpu" if asked is None else asked


def call(
    operation: str,
    table: Mapping[str, Implementation],
    implementation: str | None,
    args,
    kwargs,
    bias=None,
    softcap: float | None = None,
):
    """Run `operation(*args, **kwargs)` by the named implementation, or by the platform's. A `bias` by
    distance and a `softcap` of scores are options of `BIASED` alone.

    Raises:
      UnsupportedError: an unknown name, a name of another platform or chip, or a call that the named one
        does not support.
    """
    extra = {"bias": bias, "softcap": softcap}
    if given := {name: value for name, value in extra.items() if value is not None}:
        what = "a bias by distance" if "bias" in given else "a soft cap of scores"
        no = f"{what}: {', '.join(name for name in table if name in BIASED)} do"
        refusing = {name: Implementation(each.run, lambda *_, **__: no) for name, each in table.items()}
        table, kwargs = refusing | {n: table[n] for n in BIASED if n in table}, kwargs | given
    if implementation is None:
        name = preferred(table, args, kwargs)
        _log_choice(operation, name, *device()[:2])
        return table[name].run(*args, **kwargs)
    check_name(operation, table, implementation)
    if reason := table[implementation].refuses(*args, **kwargs):
        raise UnsupportedError(f"{operation}: {implementation} does not support {reason}")
    return table[implementation].run(*args, **kwargs)


def unnamed() -> str:
    """The default implementation on this platform, in words, for records of measurements."""
    return f"this platform's: {', else '.join(BY_PLATFORM[device()[0]])}"


def preferred(table: Mapping[str, Implementation], args, kwargs) -> str:
    """The platform's choice for a call, given arrays or their shapes."""
    platform, kind, _ = device()
    known = (n for n in BY_PLATFORM[platform] if n in table and not _missing(n, platform, kind))
    return next(name for name in known if not table[name].refuses(*args, **kwargs))


def check_name(operation: str, table: Mapping[str, Implementation], implementation: str) -> None:
    """Check that an operation has an implementation of that name on this platform and chip.

    Raises:
      UnsupportedError: an unknown name, or a name of another platform or chip.
    """
    platform, kind, _ = device()
    if implementation not in table:
        raise UnsupportedError(f"{operation} has no {implementation!r}; it has {', '.join(table)}")
    if needed := _missing(implementation, platform, kind):
        here = [name for name in table if not _missing(name, platform, kind)]
        raise UnsupportedError(
            f"{operation}: {implementation} needs a {needed}, this is {kind}: {', '.join(here)}"
        )


def _missing(implementation: str, platform: str, kind: str) -> str:
    """The platform or chip that an implementation needs, or "" if it is this one."""
    if (needed := PLATFORM_OF.get(implementation, platform)) != platform:
        return needed
    hopper = re.search(r"\bG?H\d", kind)
    return "Hopper GPU (H100, H200, GH200)" if implementation in _HOPPER and not hopper else ""


@functools.cache
def _log_choice(operation: str, name: str, platform: str, kind: str) -> None:
    """Log a choice; cached, so that each is logged once."""
    _LOG.info("%s runs as %s on %s (%s)", operation, name, platform, kind)


def expect(**pairs) -> None:
    """Check shapes: each keyword names shapes, or arrays, that must agree, `q_and_k=(q.shape[-1:],
    k.shape[-1:])`.

    None in place of an array agrees with anything.

    Raises:
      UnsupportedError: two that do not, by name.
    """
    for name, pair in pairs.items():
        shapes = [tuple(getattr(x, "shape", x)) for x in pair if x is not None]
        if len(set(shapes)) > 1:
            first, _, second = name.partition("_and_")
            raise UnsupportedError(f"{first} has {shapes[0]} where {second} has {shapes[1]}")


def divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`; 0 if none."""
    return max((d for d in range(1, min(number, most) + 1) if number % d == 0), default=0)
