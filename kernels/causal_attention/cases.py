"""Attention of packed rows as training calls it, with gradients."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.causal_attention.api import causal_attention
from swiftkv_jax.kernels.common.case import OFF, Call, Results, untuned
from swiftkv_jax.kernels.common.case import Case as Base

NAMES = ("sums", "gradient of q", "gradient of k", "gradient of v")
_ROW, _LONG_ROW = 1024, 4096  # tokens of a packed row whose numbers are checked, and the most with a window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Base):
    """A packed row and a whole one; `window`: keys that a query sees, its own included; None: all."""

    tokens: int
    heads: int
    kv_heads: int
    width: int
    window: int | None = None

    @property
    def options(self) -> dict:
        return {"window": self.tokens if self.window is None else self.window}

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def make(self, seed: int = 0) -> tuple[tuple, dict]:
        """q, k, v, the gradient of the sums, and segments of one token, of 128 tokens and of one more."""
        keys = jax.random.split(jax.random.key(seed), 4)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        arrays = (
            jax.random.normal(key, (2, self.tokens, n, self.width), self.computed)
            for key, n in zip(keys, heads, strict=True)
        )
        packed = (jnp.arange(self.tokens)[:, None] >= jnp.array([1, 129, 258])).sum(1)
        return (*arrays, jnp.stack([packed, jnp.zeros_like(packed)]).astype(jnp.int32)), {}

    def by(self, implementation: str) -> Callable:
        """A function from the arrays of `make` to (sums, the gradients of q, k and v)."""

        def run(q, k, v, slope, segments):
            attend = functools.partial(causal_attention, implementation=implementation)
            out, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments, **self.options), q, k, v)
            return out, *back(slope)

        return run

    @property
    def tolerances(self) -> Mapping[str, float]:
        return dict.fromkeys(NAMES, OFF) | {NAMES[0]: self.tolerance}

    def results(self, run: Callable) -> Results:
        return Results(dict(zip(NAMES, run(*self.make()[0]), strict=True)))

    def expected(self) -> dict[str, jax.Array]:
        *numbers, segments = self.make()[0]
        exact = untuned(self.by("reference"))(*(x.astype(jnp.float32) for x in numbers), segments)
        return dict(zip(NAMES, exact, strict=True))

    @classmethod
    def checked(cls, call: Call) -> Iterator[tuple[str, Base]]:
        for window in call.windows:
            far = -(-(window or 0) // 128) * 128 + 128  # exceeds the window, in whole lanes of a TPU
            tokens = min(call.tokens, _LONG_ROW, max(_ROW, far))
            case = cls.of_model(call, tokens=tokens, window=window)
            yield "packed rows" + ("" if window is None else f", window {window}"), case

    @classmethod
    def sizes(cls, call: Call) -> Iterator[tuple[str, Base]]:
        for window in call.windows:
            case = cls.of_model(call, tokens=call.tokens, window=window)
            yield f"{call.tokens}" + ("" if window is None else f", window {window}"), case

    def timed(self, implementation: str) -> Callable[[], tuple]:
        args, run = self.make()[0], jax.jit(self.by(implementation))
        return lambda: run(*args)
