"""A threshold leaves keys out tile by tile, in the order in which a kernel reads them."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.papers.slim_threshold import left_out

HEADS, TOKENS, WIDTH = 2, 10, 3


def case():
    """(causal scores [N, T, T], values [T, N, U]), of which some keys weigh next to nothing."""
    random = np.random.default_rng(0)
    scores = 4 * random.standard_normal((HEADS, TOKENS, TOKENS)).astype(np.float32)
    scores = np.where(np.tri(TOKENS, dtype=bool), scores, -np.inf)
    return scores, random.standard_normal((TOKENS, HEADS, WIDTH)).astype(np.float32)


def one_by_one(scores, values, tile: int, threshold: float, together: bool) -> np.ndarray:
    """Left out, seen, squared error and size, by a loop over queries and tiles."""
    out = np.zeros(4)
    for t in range(TOKENS):
        kept = np.ones((HEADS, TOKENS))
        top = np.full(HEADS, -np.inf)
        for start in range(0, t + 1, tile):
            most = scores[:, t, start : start + tile].max(1)
            top = np.maximum(top, most)
            wanted = np.exp(most - top) >= threshold
            wanted = np.full(HEADS, wanted.any()) if together else wanted
            kept[:, start : start + tile] = wanted[:, None]
            out[:2] += (~wanted).sum(), HEADS
        shares = np.exp(scores[:, t] - scores[:, t].max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        want, got = (np.einsum("ns,snu->nu", shares * k, values) for k in (1.0, kept))
        out[2:] += ((got - want) ** 2).sum(), (want**2).sum()
    return out


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.6])
def test_tiles_are_skipped_as_the_kernel_skips_them(threshold):
    """10 keys in tiles of 4: the last tile is not full."""
    scores, values = case()
    got = np.asarray(left_out(jnp.array(scores), jnp.array(values), jnp.ones(TOKENS, bool), 4, threshold))
    want = [one_by_one(scores, values, 4, threshold, together) for together in (True, False)]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-10)
    assert (got[1, 0] > got[0, 0] > 0) == (threshold > 0) and (got[:, 2] > 0).all() == (threshold > 0)
