"""The losses against float64 numpy and PyTorch, and what they hold in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_models import PLAIN

from swiftkv_jax.core.ends import head
from swiftkv_jax.distill import loss as losses

B, T, D, V = 3, 13, 8, 37


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    s, t = rng.normal(size=(2, B, T, D)).astype(np.float32)
    kernel = rng.normal(size=(D, V)).astype(np.float32)
    mask = (rng.random((B, T)) < 0.6).astype(np.float32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    return tuple(jnp.asarray(x) for x in (s, t, kernel, mask, targets))


def wide(x):
    return np.array(x, np.float64)


def head_of(kernel):
    return lambda h: jnp.matmul(h, kernel)


@pytest.mark.parametrize("chunk", [1, 5, 13, 64])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_is_torchs_in_float64(arrays, chunk, temperature):
    s, t, kernel, mask, _ = arrays
    got = losses.kl_sum(head_of(kernel), head_of(kernel), s, t, mask, temperature, chunk)
    student, teacher = (torch.tensor(wide(x) @ wide(kernel)) / temperature for x in (s, t))
    each = torch.nn.functional.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    want = (each * torch.tensor(wide(mask))).sum().item() * temperature**2
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("dtype, error", [("float32", 1e-5), ("bfloat16", 0.02)])
def test_kl_gradient_is_torchs(arrays, dtype, error):
    """Of inputs that are exact in `dtype`; bfloat16 then rounds each result to a relative 2^-9."""
    s, t, kernel, mask, _ = arrays
    s, t, kernel = (x.astype(dtype) for x in (s, t, kernel))
    of = functools.partial(head, PLAIN, {"lm_head": kernel})
    got = jax.grad(lambda s: losses.kl_sum(of, of, s, t, mask, 2.0, 5))(s)
    assert got.dtype == dtype
    x = torch.tensor(wide(s), requires_grad=True)
    w = torch.tensor(wide(kernel))
    teacher = (torch.tensor(wide(t)) @ w / 2).log_softmax(-1)
    each = torch.nn.functional.kl_div(
        (x @ w / 2).log_softmax(-1), teacher, log_target=True, reduction="none"
    ).sum(-1)
    ((each * torch.tensor(wide(mask))).sum() * 4).backward()
    np.testing.assert_allclose(np.float64(got), x.grad.numpy(), atol=error)


def test_no_gradient_reaches_the_teacher(arrays):
    s, t, kernel, mask, _ = arrays
    got = jax.grad(lambda t: losses.kl_sum(head_of(kernel), head_of(kernel), s, t, mask, 2.0, 5))(t)
    assert not np.any(got)


@pytest.mark.parametrize("chunk", [1, 4, 13])
def test_cross_entropy_is_torchs(arrays, chunk):
    s, _, kernel, mask, targets = arrays
    (got,) = losses.cross_entropy_sums(head_of(kernel), s, targets, mask, chunk)
    logits = torch.tensor(wide(s) @ wide(kernel)).reshape(-1, V)
    chosen = torch.tensor(np.array(targets, np.int64).reshape(-1))
    each = torch.nn.functional.cross_entropy(logits, chosen, reduction="none")
    np.testing.assert_allclose(got, (each.numpy() * wide(mask).reshape(-1)).sum(), rtol=1e-5)


def test_hidden_loss_counts_real_tokens_only(arrays):
    s, t, _, mask, _ = arrays
    want = (((wide(s) - wide(t)) ** 2).mean(-1) * wide(mask)).sum()
    np.testing.assert_allclose(losses.hidden_sum(s, t, mask), want, rtol=1e-5)


def test_peak_memory_does_not_grow_with_the_vocabulary():
    """Forward and backward, at one budget of logits: ten times the vocabulary, about the same temporaries."""
    batch, length, width, mib = 4, 512, 16, 0.5

    def temporaries(vocab: int) -> int:
        chunk = losses.chunk_length(batch, length, vocab, mib)
        h = jax.ShapeDtypeStruct((batch, length, width), jnp.float32)
        mask = jax.ShapeDtypeStruct((batch, length), jnp.float32)
        kernel = jax.ShapeDtypeStruct((width, vocab), jnp.float32)

        def loss(s, t, mask, kernel):
            return losses.kl_sum(head_of(kernel), head_of(kernel), s, t, mask, 2.0, chunk)

        return (
            jax.jit(jax.grad(loss)).lower(h, h, mask, kernel).compile().memory_analysis().temp_size_in_bytes
        )

    whole = batch * length * 20480 * 4
    assert temporaries(20480) < whole / 8
    assert temporaries(20480) < temporaries(2048) + 6 * mib * 2**20
