"""The closed-form start of least_squares.py for a student whose rows are latents (DeepSeek).

A row of one layer keeps that layer's norm and `kv_b_proj`; its latent before the norm, and the rotary part of
its keys, are fitted. Layers that share a row share its `kv_b_proj` too, and the latents of two layers have no
basis in common, so the mean of their matrices means little. Instead the keys (without their rotary part) and
values of all heads are fitted to the mean of the layers', of values by each layer's output projection. The
latent is made of the directions of the stream that carry most of these (reduced-rank regression). They have
variance 1, so that the norm after them changes little.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core import weights
from swiftkv_jax.core.latent import expanded, latent_of
from swiftkv_jax.core.layers import LATENT_EPS, rms_norm
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.scan import angles_and_segments, through
from swiftkv_jax.core.shapes import Hidden, PyTree
from swiftkv_jax.distill.data.packing import Batch
from swiftkv_jax.distill.least_squares import (
    RIDGES,
    Problem,
    begun,
    each_row,
    like,
    received,
    regressors,
    solve,
    with_rows,
)
from swiftkv_jax.kernels.causal_attention.api import causal_attention

_einsum = partial(jnp.einsum, precision="highest")
_NOTHING = np.zeros(0)
_LEAST = 1e-9  # of the mean of a matrix's diagonal, added so that it has an inverse


class Sums(NamedTuple):
    """Sums over tokens: gram [A, A] of the regressors, cross [A, F] with the targets."""

    gram: Any
    cross: Any


def fit(
    student: Transformer,
    params: PyTree,
    teacher: Transformer,
    own_params: PyTree,
    batches: Iterable[Batch],
    ridge: float | None = None,
) -> PyTree:
    """As `least_squares.fit`, for a student whose rows are latents.

    The devices hold, for one layer, [A, A + N (n + v)] in float32 with A = D: 50 MiB for DeepSeek-V2-Lite.
    """
    config, data, solved = student.config, begun(student, params, batches, ridge), {}
    for row, layers in each_row(student, teacher, own_params, data, step):
        layers = [(jax.tree.map(lambda x: x.astype(np.float64), parts), cost) for parts, cost in layers]
        if len(layers) == 1:
            solved[row] = {"kv_a_proj": mapped(layers[0][0], data.ridge)}
        else:
            solved[row] = of_group(config, layers, data.ridge, data.tokens)

    def fitted(numbers: range, stack: PyTree) -> PyTree:
        width, out = config.hidden_size, dict(stack)
        rows = [solved[row] for row in numbers]
        maps = np.stack([row["kv_a_proj"] for row in rows])
        parts = {"kernel": maps[:, :width], "bias": maps[:, -1]}
        out["kv_a_proj"] = {leaf: like(old, parts[leaf]) for leaf, old in stack["kv_a_proj"].items()}
        if any("kv_b_proj" in row for row in rows):
            old = {"kv_b_proj": stack["kv_b_proj"]["kernel"], "kv_a_norm": stack["kv_a_norm"]}
            new = {
                name: np.stack([row.get(name, np.asarray(leaf[i])) for i, row in enumerate(rows)])
                for name, leaf in old.items()
            }
            out["kv_b_proj"] = {"kernel": like(old["kv_b_proj"], new["kv_b_proj"])}
            out["kv_a_norm"] = like(old["kv_a_norm"], new["kv_a_norm"])
        return out

    return with_rows(student, params, fitted)


@partial(jax.jit, static_argnums=(0, 1, 2))
def step(
    config: ModelConfig,
    model: Transformer,
    shared: bool,
    params: PyTree,
    start: Hidden,
    x: Hidden,
    batch: Batch,
) -> tuple[Hidden, Sums]:
    """(hidden states leaving a layer of the teacher, the sums of one batch). The targets are the latent and
    the rotary part of the keys as they leave their projection, and tokens count by the attention that they
    receive; of a row that layers share, all heads' keys and values and that part, and tokens count alike."""
    at, segments = angles_and_segments(config, batch.tokens, batch.positions, batch.segments)
    counts = [(segments > 0).astype(jnp.float32)]

    def attention(q, k, v, segments, window, **options):
        if not shared:
            counts.append(received(q, k, segments, window, **options).sum(-1))
        return causal_attention(q, k, v, segments, window, **options)

    passed = through(model, params, x, at, segments, keep=(0,), attention=attention)
    targets, row = passed.raw[0].arrays[0][0], weights.row(params, 0)
    if shared:
        made, rotary = jnp.split(targets, [latent_of(config).rank], axis=-1)
        both = expanded(rms_norm(made, row["kv_a_norm"], LATENT_EPS), row["kv_b_proj"])
        targets = jnp.concatenate([both.reshape(*both.shape[:2], -1), rotary], axis=-1)
    n = regressors(config, start)
    seen = n * (counts[0] * counts[-1])[..., None]
    cross = _einsum("bta,btf->af", seen, targets.astype(jnp.float32))
    return passed.x, Sums(_einsum("bta,btc->ac", seen, n), cross)


def of_group(
    config: ModelConfig, layers: Sequence[tuple[list[Sums], np.ndarray]], ridge: float | None, tokens: int
) -> dict[str, np.ndarray]:
    """The weights of a row that several layers read, from the sums of each, and its `output_weights`."""
    latent, heads = latent_of(config), config.num_heads
    made = heads * (latent.plain + latent.value)
    costs = [
        cost + _LEAST * np.trace(cost, axis1=1, axis2=2).mean() * np.eye(latent.value) for _, cost in layers
    ]
    whole = np.sum(costs, axis=0)  # [N, v, v]

    def together(each: Sequence[Sums]) -> Sums:
        """The sums with the targets that suit all layers: means, of values by cost."""
        both = [x.cross[:, :made].reshape(len(x.cross), heads, -1) for x in each]
        keys = np.mean([x[..., : latent.plain] for x in both], axis=0)
        values = sum(
            np.einsum("anu,nuw->anw", x[..., latent.plain :], cost)
            for x, cost in zip(both, costs, strict=True)
        )
        values = np.einsum("anw,nwu->anu", values, np.linalg.inv(whole))
        rotary = np.mean([x.cross[:, made:] for x in each], axis=0)
        columns = np.concatenate([keys, values], axis=-1).reshape(len(keys), -1)
        return Sums(each[0].gram, np.concatenate([columns, rotary], axis=-1))

    parts = [together(each) for each in zip(*(found for found, _ in layers), strict=True)]
    maps = mapped(parts, ridge)
    both = maps[:, :made].reshape(len(maps), heads, -1)
    gram = np.sum([part.gram for part in parts], axis=0)
    root = np.linalg.cholesky(gram + _LEAST * np.trace(gram) / len(gram) * np.eye(len(gram)))  # L L^T
    spread = np.einsum("ab,anh->bnh", root, both)
    values = np.einsum("bnu,nuw->bnw", spread[..., latent.plain :], np.linalg.cholesky(whole))
    kinds = [x.reshape(len(x), -1) for x in (spread[..., : latent.plain], values)]
    found = sum(x @ x.T / np.vdot(x, x) for x in kinds)  # keys and values count alike
    _, vectors = np.linalg.eigh(found)
    most = vectors[:, : -latent.rank - 1 : -1]  # [A, R]
    inside = np.linalg.solve(root.T, most) * tokens**0.5
    return {
        "kv_a_proj": np.concatenate([inside, maps[:, made:]], axis=-1),
        "kv_a_norm": np.ones(latent.rank),
        "kv_b_proj": np.einsum("ar,anh->nrh", most, spread) / tokens**0.5,
    }


def mapped(parts: Sequence[Sums], ridge: float | None) -> np.ndarray:
    """[A, F]: the best map from regressors to targets, over all parts. The ridge is the one of `RIDGES` with
    the least error on the last part, if it is not given."""

    def found(sums: Sums, ridge: float) -> np.ndarray:
        problem = Problem(sums.gram[None], sums.cross[None, :, None], _NOTHING)
        return solve(problem, ridge, len(sums.gram))[:, 0]

    if ridge is None:
        held = parts[-1]
        tried = [found(parts[0], ridge) for ridge in RIDGES]
        ridge = RIDGES[int(np.argmin([np.vdot(held.gram @ x - 2 * held.cross, x) for x in tried]))]
    return found(Sums(*(np.sum(each, axis=0) for each in zip(*parts, strict=True))), ridge)
