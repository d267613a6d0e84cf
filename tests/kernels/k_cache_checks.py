"""Helpers for tests of attention without values: its definition in float64, and blocks of one sequence."""

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.kernels.k_cache_attention import cases, reference


def exact(case: cases.Case, args, arrays) -> np.ndarray:
    """The definition in float64, of the same rounded inputs."""
    with jax.enable_x64(True):
        wide = [a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in args]
        if case.stored == "int8":
            wide[1] = args[1].astype(jnp.float64)
        arrays = {k: None if a is None else a.astype(jnp.float64) for k, a in arrays.items()}
        run = jax.jit(lambda *a, **k: reference.k_cache_attention(*a, **k, **case.options))
        return np.asarray(run(*wide, **arrays))


def agree(case: cases.Case, got, want):
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error <= case.tolerance * max(np.abs(want).max(), 1e-30), error
    assert (np.asarray(got)[np.array(case.lengths) == 0] == 0).all()


def in_blocks(case: cases.Case, size: int):
    """The case's arguments with each sequence's queries cut into blocks of `size`, those of one sequence not
    side by side; and a function that puts results back."""
    (q, *pools, table, sequence, position), arrays = case.make()
    cut = case.queries // size
    order = np.argsort(np.tile(np.arange(cut), len(sequence)), kind="stable")

    def blocks(x):
        return x.reshape(-1, size, *x.shape[2:])[order]

    args = (blocks(q), *pools, table, np.repeat(sequence, cut)[order], blocks(position))
    return args, arrays, lambda got: np.asarray(got)[np.argsort(order)].reshape(q.shape)
