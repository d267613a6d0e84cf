"""Matrices of cache rows: between keys and values, solved in float64 on the host (Slim attention, arXiv
2503.05840), and the Hadamard transform of inputs."""

import math
import warnings
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.core.shapes import Array, Float

SINGULAR = 1e12  # a condition number above which a solve in float64 leaves fewer than four digits
_PIECE = 128  # numbers that one Hadamard matrix transforms, at most
_NOISE = 1 / np.finfo(np.float32).eps  # one that makes an error as large as the value of rounding to float32


def condition(kernel: np.ndarray) -> float:
    """Largest over smallest singular value, inf of a singular matrix."""
    s = np.linalg.svd(kernel, compute_uv=False)
    return float(s[0] / s[-1]) if s[-1] > 0 else float("inf")


def between(kernel: np.ndarray, other: np.ndarray, name: str) -> np.ndarray:
    """kernel^-1 other in float64, by the right inverse where `kernel` [D, E] is wider than high."""
    u, s, v = np.linalg.svd(kernel.astype(np.float64), full_matrices=False)
    if not s[-1] * SINGULAR > s[0]:
        found = f"{s[0] / s[-1]:.1e}" if s[-1] > 0 else "infinite"
        raise UsageError(
            f"{name} is singular (condition {found}), so values cannot be computed from its keys: keep this "
            "row as keys and values (--forms auto)"
        )
    return v.T @ ((u.T @ other) / s[:, None])


def between_rows(
    kernels: np.ndarray,
    others: np.ndarray,
    solved: Sequence[np.ndarray | None],
    dtype,
    names: Sequence[str],
) -> np.ndarray:
    """For each of n rows its matrix in `solved`, or `between` of its kernels [n, D, E]; all fit `dtype`.

    It warns of a condition at which even keys in float32 give wrong values.
    """
    out = []
    for kernel, other, matrix, name in zip(kernels, others, solved, names, strict=True):
        out.append(between(kernel, other, name) if matrix is None else matrix)
        if matrix is None and (found := condition(kernel)) > _NOISE:
            warnings.warn(
                f"{name} has condition {found:.1e}: recovered values have no correct digit, even in float32; "
                "swiftkv slim measures the cost of each row",
                UsageWarning,
                stacklevel=5,
            )
        most = np.abs(out[-1]).max()
        if dtype == jnp.float16 and not most < float(jnp.finfo(dtype).max):
            raise UsageError(
                f"{name} makes a W_KV of up to {most:.3g}, and float16 ends at 65504: load the model in "
                "bfloat16 or float32"
            )
    return np.stack(out)


def heads_first(leaf: Array, heads: int) -> Array:
    """[n, E, N * U] as [n, N, E, U], a bias [n, N * U] as [n, N, U]."""
    cut = leaf.reshape(*leaf.shape[:-1], heads, -1)
    return jnp.moveaxis(cut, -2, 1)


def hadamard(x: Float[Array, "*batch w"], inverse: bool = False) -> Float[Array, "*batch w"]:
    """Each piece of the last axis times a Hadamard matrix, in x's dtype.

    A piece is the largest power of two that divides the width, up to 128. With `inverse` the result of the
    transform is transformed back; the factor of each way is a power of two, which no dtype rounds.
    """
    from scipy import linalg  # here, since few processes transform anything

    piece = math.gcd(x.shape[-1], _PIECE)
    halvings = piece.bit_length() - 1
    factor = 0.5 ** (halvings - halvings // 2 if inverse else halvings // 2)
    cut = x.reshape(*x.shape[:-1], -1, piece)
    matrix = jnp.asarray(factor * linalg.hadamard(piece), x.dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    made = jnp.matmul(cut, matrix, precision="highest", preferred_element_type=wide)
    return made.astype(x.dtype).reshape(x.shape)
