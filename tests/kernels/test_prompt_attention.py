"""Attention inside prompts: every implementation equals its definition, and the definition the paged one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.paged_attention import reference as paged
from swiftkv_jax.kernels.prompt_attention import api, cases, jax_nn, reference


def exact(case: cases.Case, args) -> np.ndarray:
    """The definition in float64, of the same rounded inputs."""
    with jax.enable_x64(True):
        wide = [a.astype(jnp.float64) for a in args[:3]]
        return np.asarray(reference.prompt_attention(*wide, args[3], **case.options))


def agree(case: cases.Case, run):
    args, _ = case.make()
    want, got = exact(case, args), np.asarray(jax.jit(run)(*args), np.float64)
    assert np.abs(got - want).max() <= case.tolerance * np.abs(want).max()
    for prompt, length in zip(got, case.lengths, strict=True):
        assert (prompt[length:] == 0).all()


@pytest.mark.parametrize("name", cases.SMALL)
def test_xla_agrees_with_the_definition(name):
    case = cases.SMALL[name]
    agree(case, functools.partial(api.prompt_attention, **case.options, implementation="xla"))


@pytest.mark.parametrize("name", ["lengths", "window"])
def test_cudnn_is_asked_for_the_same(name, monkeypatch):
    """cuDNN's arguments are passed to the implementation of jax.nn that runs here."""
    asked, attend = [], jax.nn.dot_product_attention

    def by_xla(*args, implementation, **options):
        asked.append(implementation)
        return attend(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    case = dataclasses.replace(cases.SMALL[name], computed="bfloat16")
    agree(case, functools.partial(jax_nn.prompt_attention, **case.options, by="cudnn"))
    assert asked == ["cudnn"]


@pytest.mark.parametrize("window", [None, 7])
def test_the_definition_is_that_of_paged_attention(window):
    """A prompt whose keys lie in one page, every query at its own position."""
    case = cases.Case(lengths=(48, 20), window=window)
    q, k, v, lengths = case.make()[0]
    flat = [x.reshape(1, 2, 48, -1) for x in (k, v)]
    at = jnp.arange(48)
    position = jnp.where(at < lengths[:, None], at, -1)
    table = jnp.arange(2)[:, None]
    want = paged.paged_attention(
        q, *flat, table, jnp.arange(2), position, row=0, **case.options, k_scale=None, v_scale=None
    )
    got = reference.prompt_attention(q, k, v, lengths, **case.options)
    np.testing.assert_allclose(got, jnp.where(position[..., None, None] >= 0, want, 0), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "float32 queries, float32 keys and float32 values: all bfloat16 or all float16"),
        ({"computed": "bfloat16", "width": 260}, "heads 260 wide: multiples of 8 up to 256"),
    ],
)
def test_cudnn_says_what_it_supports(change, message, monkeypatch):
    monkeypatch.setattr(dispatch, "device", lambda: ("gpu", "a chip", 1))
    case = cases.Case(lengths=(4,), tokens=4, **change)
    with pytest.raises(dispatch.UnsupportedError, match=message):
        api.prompt_attention(*case.make()[0], implementation="cudnn")


def test_bad_calls_are_named():
    q, k, v, lengths = cases.Case(lengths=(4,), tokens=4).make()[0]
    with pytest.raises(dispatch.UnsupportedError, match="cudnn needs a gpu, this is cpu: reference, xla"):
        api.prompt_attention(q, k, v, lengths, implementation="cudnn")
    with pytest.raises(TypeCheckError, match="parameter 'v'"):
        api.prompt_attention(q, k, v[:, :3], lengths)
    with pytest.raises(dispatch.UnsupportedError, match="3 query heads do not share 2"):
        api.prompt_attention(q[:, :, :3], k, v, lengths)
