"""Ways to store each row of a model: by the exact inverse, and by a fit to a text's rows as a cache rounds
them.

For a row of keys, values are (K - b_K) W_KV + b_V. The exact W_KV is W_K^-1 W_V. Rounding K adds noise, which
W_KV amplifies by up to the condition number of W_K. So the fit solves for the W_KV that makes values from
keys *as the cache rounds them*, by least squares in float64. Which of the two is better is measured. For a
row of values the same holds with keys and values exchanged; a row of inputs needs no W.

Rows of an encoder's output are handled in the same way, at the layer whose cross-attention reads them.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.config.plan import ENCODER, SELF
from swiftkv_jax.core import weights
from swiftkv_jax.core.ends import normalised
from swiftkv_jax.core.layers import after, before, causal_bias, linear, queries, see_all
from swiftkv_jax.core.matrices import SINGULAR, between, condition
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.rows import FORMS, SLIM, reader_of, rounded
from swiftkv_jax.core.scan import Entering, walk
from swiftkv_jax.core.shapes import Array, PyTree
from swiftkv_jax.core.surgery import hadamard_inputs, to_slim
from swiftkv_jax.kernels.causal_attention.api import causal_attention
from swiftkv_jax.slim.texts import Pieces

RIDGES = (1e-10, 1e-8, 1e-6, 1e-4)  # relative to the stored rows' mean square; the kept half decides
EXACT, FITTED = "exact", "calibrated"


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """One way to store a row.

    Attributes:
      row: its index in the plan. form: key of rows.FORMS. how: the origin of its matrix, EXACT or FITTED.
      matrix: [E, E] float64, W_KV or W_VK; None for inputs. ridge: of a fit.
      error: relative error (Frobenius) of the recovered values, or keys, on the kept half.
      output_error: the same of the attention output of the first layer that reads the row.
      kl, agreement: with the plain model, if only this row is stored so; measured last.
    """

    row: int
    form: str
    how: str
    matrix: np.ndarray | None = None
    ridge: float | None = None
    error: float = 0.0
    output_error: float = 0.0
    kl: float = 0.0
    agreement: float = 1.0


@dataclasses.dataclass(frozen=True)
class RowCandidates:
    """The candidates for one row.

    Attributes:
      condition: of W_K. largest: |W_KV| of the exact inverse, 0 without one. refused: form -> why it is
        refused.
    """

    row: int
    condition: float
    largest: float
    candidates: tuple[Candidate, ...]
    refused: dict[str, str]


class _Input(NamedTuple):
    """The input of a row in a batch: `h` [B, T, D], of which the positions `some` count; `x` enters the
    attention that reads the row. text: what the batch is made of. entering: its state before the layer."""

    h: Array
    some: np.ndarray
    x: Array
    text: Pieces
    entering: Entering


def served(model: Transformer, params: PyTree, picks: list[Candidate]) -> tuple[Transformer, PyTree]:
    """`converted`, with rows as an engine stores them."""
    return hadamard_inputs(*converted(model, params, picks))


def converted(model: Transformer, params: PyTree, picks: list[Candidate]) -> tuple[Transformer, PyTree]:
    """The model with the rows of `picks` stored in these ways."""
    plan = model.plan
    stored = {pick.row: pick.form for pick in picks}
    own, cross = ([stored.get(row, "kv") for row in rows] for rows in (range(len(plan.own.rows)), plan.cross))
    solved = {pick.row: pick.matrix for pick in picks if pick.matrix is not None}
    return to_slim(model, params, own, solved, cross or "kv")


def candidates(
    model: Transformer, params: PyTree, fit: Pieces, kept: Pieces, forms: list[str], dtype: str
) -> Iterator[RowCandidates]:
    """For each row, in the order of its first reader, every way to store it in one of `forms`.

    model: with rows of keys and values, computing in float32. dtype: of the cache.
    """
    plan, halves = model.plan, [list(half.batches()) for half in (fit, kept)]
    batches = [(jnp.asarray(text.tokens), text.encoded) for half in halves for text in half]
    inputs: dict[int, list[list[Array]]] = {}  # of each row, until its first reader is reached
    for layer, states in enumerate(walk(model, params, batches)):
        rest = iter(states)
        both = [[(text, next(rest)) for text in half] for half in halves]
        for shared in {plan.rows[row].shared_norm for row in plan.made_at(layer)}:
            h = [[normalised(model, params, shared, layer, now.x) for _, now in half] for half in both]
            due = [row for row in plan.made_at(layer) if plan.rows[row].shared_norm == shared]
            inputs |= dict.fromkeys(due, h)
        for row in [row for row in inputs if plan.readers(row)[0] == layer]:
            pairs = [zip(inner, half, strict=True) for inner, half in zip(inputs.pop(row), both, strict=True)]
            seen = [[_Input(h, text.real, now.x, text, now) for h, (text, now) in half] for half in pairs]
            yield _ways_of(model, params, row, seen, forms, dtype)
        if plan.cross:
            seen = [[_at_cross(model, params, layer, text, now) for text, now in half] for half in both]
            yield _ways_of(model, params, plan.cross[layer], seen, forms, dtype)


def _at_cross(model: Transformer, params: PyTree, layer: int, text: Pieces, now: Entering) -> _Input:
    """The inputs of a layer's cross-attention: the encoder's output, and the stream after self-attention."""
    assert now.encoded is not None and text.beside is not None
    h = normalised(model, params, False, layer, now.x)
    row, p = weights.row(params, model.plan.read_by(layer)[0]), weights.layer(params, layer)["attentions"][0]
    update = _output(model, SELF, layer, "kv", "auto", row, p, params.get("relative"), now.x, h, now)
    return _Input(now.encoded.x, text.beside.some, now.x + update, text, now)


def _ways_of(
    model: Transformer, params: PyTree, row: int, seen: list[list[_Input]], forms: list[str], dtype: str
) -> RowCandidates:
    p = weights.row(params, row)
    keys, values = [_stored(p, form, seen, dtype) for form in ("k", "v")]
    of_keys, out, refused, name = condition(SLIM["k"].kernels(p)[0]), [], {}, model.plan.name(row)
    for form in forms:
        if form == "x":
            out.append(Candidate(row, "x", EXACT))
            continue
        rows, others = (keys, values) if form == "k" else (values, keys)
        a, b = SLIM[form].kernels(p)
        number = of_keys if form == "k" else condition(a)
        if number >= SINGULAR:
            refused[form] = f"{name}: W_{form.upper()} is singular (condition {number:.1e})"
            continue
        exact = Candidate(row, form, EXACT, between(a, b, f"row {row}"))
        fits = [
            Candidate(row, form, FITTED, matrix, ridge)
            for ridge, matrix in zip(RIDGES, solve(rows[0].rounded, others[0].exact), strict=True)
        ]
        kept, wanted = rows[1].rounded, others[1].exact
        exact, *fits = (_with_error(c, params["embed"].dtype, kept, wanted) for c in (exact, *fits))
        finite = [c for c in (exact, min(fits, key=lambda c: c.error)) if np.isfinite(c.error)]
        out += finite
        if not finite:
            refused[form] = (
                f"{name}: its matrix holds {np.abs(exact.matrix).max():.1e}, more than float16 can"
            )
    out = [_with_output_error(c, model, params, seen[1], dtype) for c in out]
    largest = next((float(np.abs(c.matrix).max()) for c in out if c.matrix is not None), 0.0)
    return RowCandidates(row, of_keys, largest, tuple(out), refused)


class _Rows(NamedTuple):
    """Keys or values [n, E] of one half, without biases, in float64: exact, and as a cache rounds them."""

    exact: np.ndarray
    rounded: np.ndarray


def _stored(p: PyTree, form: str, seen: list[list[_Input]], dtype: str) -> list[_Rows]:
    """Keys (form "k") or values ("v") of both halves; keys are rounded with their bias."""
    bias, out = SLIM[form].origin(p), []
    for half in seen:
        rows = np.concatenate([np.asarray(SLIM[form].project(p, part.h)[0])[part.some] for part in half])
        (back,) = rounded((jnp.asarray(rows)[:, None],), dtype)
        out.append(_Rows(rows.astype(np.float64) - bias, np.asarray(back[:, 0], np.float64) - bias))
    return out


def solve(rows: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
    """For each of RIDGES, argmin over W of |rows W - wanted|^2 + ridge * s * n * |W|^2, in float64.

    rows, wanted: [n, E]; s is the mean square of `rows`.
    """
    gram, cross = rows.T @ rows, rows.T @ wanted
    scale, eye = np.trace(gram) / len(gram), np.eye(len(gram))
    return [np.linalg.solve(gram + ridge * scale * eye, cross) for ridge in RIDGES]


def _with_error(c: Candidate, dtype, rows: np.ndarray, wanted: np.ndarray) -> Candidate:
    """The candidate with the error of its matrix, rounded to `dtype`, that of the model's weights."""
    assert c.matrix is not None
    with np.errstate(over="ignore", invalid="ignore"):  # float16 may overflow, which is then reported
        got = rows @ c.matrix.astype(dtype).astype(np.float64)
    return dataclasses.replace(c, error=float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)))


def _with_output_error(
    c: Candidate, model: Transformer, params: PyTree, half: list[_Input], dtype: str
) -> Candidate:
    layer, space = model.plan.readers(c.row)[0], model.plan.rows[c.row].space
    slim, made = served(model, params, [c])
    row = slim.plan.read_by(layer)[space != SELF]
    stored = slim.plan.rows[row].form, dtype, weights.row(made, row)
    off = of = 0.0
    for seen in half:
        p, q = (weights.layer(tree, layer)["attentions"][space != SELF] for tree in (params, made))
        args, real = (params.get("relative"), seen.x, seen.h, seen.entering), seen.text.real
        want = _output(model, space, layer, "kv", "auto", weights.row(params, c.row), p, *args)[real]
        got = _output(slim, space, layer, *stored, q, *args)[real]
        off, of = off + float(jnp.sum((got - want) ** 2)), of + float(jnp.sum(want**2))
    return dataclasses.replace(c, output_error=float(np.sqrt(off / of)))


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _output(
    model: Transformer,
    space: str,
    layer: int,
    form: str,
    dtype,
    row: PyTree,
    p,
    relative,
    x,
    h,
    now: Entering,
) -> Array:
    """The residual update [B, T, D] of a layer's attention, from a row stored in `form`, rounded or not.

    x: the stream that enters the attention. h: the row's input. now: the state before the layer.
    """
    config, stored = model.config, FORMS[form]
    angles = now.angles.of(config, model.plan.rows[model.plan.read_by(layer)[0]].maker)
    made = rounded(stored.make(config, row, h, angles), dtype)
    k, v = stored.keys_values(config, reader_of(stored, stored.reader(row), p), made, angles)
    q = queries(config, p, before(config, p, x), angles)
    if space == ENCODER and now.encoded is not None:
        mixed = see_all(q, k, v, now.encoded.lengths)
    else:
        bias = None if relative is None else causal_bias(config, relative, x.shape[1])
        mixed = causal_attention(q, k, v, now.segments, config.windows[layer], bias=bias)
    return after(config, p, linear(mixed.reshape(*x.shape[:-1], -1), p["o_proj"]))
