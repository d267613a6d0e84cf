"""Candidates for a check: decoding by the definition, but with something wrong about it, or slower.

`register()` puts them into the table of kernels/paged_attention/api.py, as the checking process asks.
"""

import os
import time

import jax
import numpy as np

from swiftkv_jax.kernels.common.dispatch import Implementation
from swiftkv_jax.kernels.paged_attention import api, reference


def wrong(*args, **options):
    """One number of all is off."""
    return reference.paged_attention(*args, **options).at[-1, 0, 1, 5].add(0.5)


def leaking(q, k, *args, **options):
    """NaN of unused pages reaches the answer."""
    return reference.paged_attention(q, k, *args, **options) + 0 * k[1, :, 0, 0].sum()


def _noise():
    return np.float32(time.time_ns() % 97 / 1e4)


def differing(*args, **options):
    """Two runs differ."""
    out = reference.paged_attention(*args, **options)
    return (out * (1 + jax.pure_callback(_noise, jax.ShapeDtypeStruct((), "float32")))).astype(out.dtype)


def hanging(*_, **__):
    time.sleep(600)


def aborting(*_, **__):
    os.abort()


def within(seconds: float):
    """The definition, in so many seconds."""

    def one():
        time.sleep(seconds)
        return np.float32(1)

    def run(*args, **options):
        out = reference.paged_attention(*args, **options)
        return out * jax.pure_callback(one, jax.ShapeDtypeStruct((), "float32"))

    return run


FAULTY = {f.__name__: f for f in (wrong, leaking, differing, aborting, hanging)}
ALL = FAULTY | {"safe": within(0.1), "nearly": within(0.098), "fast": within(0.01)}


def register() -> None:
    api.PAGED_ATTENTION.update({name: Implementation(f) for name, f in ALL.items()})
