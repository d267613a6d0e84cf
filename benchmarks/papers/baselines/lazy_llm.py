"""LazyLLM (arXiv 2407.14057): deeper layers see fewer tokens, chosen again at each step.

Below 0.3 of the depth all tokens run. From there on a layer sees only a share of them: those with the highest
attention weights of the last token in the layer before, averaged over heads. The hidden states of a token
that does not enter a layer are kept. A later step that chooses the token there continues from them, so that a
token runs each layer at most once.

Of a SwiftKV student, layers past the split choose among the tokens that reached it: no other has a row there.
"""

import dataclasses

import jax.numpy as jnp

from benchmarks.papers.baselines import dense
from benchmarks.papers.baselines.dense import State, Step
from benchmarks.papers.prediction_flops import lazy_share
from swiftkv_jax.common.checks import above, integer
from swiftkv_jax.core.ends import embed
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import Array, Float, Int, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyLLM:
    """Attributes:
      start: share of the tokens so far, rounded up, that layers see at 0.3 of the depth. end: the same from
        0.9 on; linear between. The last token is always among them.
      revive: tokens that one layer takes up again in one step at most, the best first; None for all. What a
        layer chooses beyond them, and has no row of, stays unseen in that step.

    Raises:
      UsageError: a share is not in (0, 1], end is above start, or revive is not an integer of 0 or more.
    """

    start: float
    end: float
    revive: int | None = None

    def __post_init__(self):
        above("end", self.end, 0, above("start", self.start, 0, 1))
        if self.revive is not None:
            integer("revive", self.revive, 0)

    def shares(self, layers: int) -> tuple[float, ...]:
        """The share of the tokens that each layer sees."""
        return tuple(lazy_share(self.start, self.end, layer / layers) for layer in range(layers))

    def read(self, model, params, tokens, lengths, slots) -> Step:
        """As `generate.read`."""
        places, layers = jnp.arange(tokens.shape[1]), model.config.num_layers
        at = jnp.where(places < lengths[:, None], places, slots)
        most = [int(dense.counts(share, tokens.shape[1])[-1]) for share in self.shares(layers)]
        shape = (len(tokens), slots, model.config.hidden_size)
        shares = self.shares(layers)  # of some layers fewer tokens than of the one before
        stages = (share < before for share, before in zip(shares, (1.0, *shares), strict=False))
        left = tuple(jnp.zeros(shape, model.dtype) if stage else None for stage in stages)
        state = State(dense.empty(model, len(tokens), slots), lengths, left)
        return self._run(model, params, embed(model, params, tokens, at), at, state, most)

    def extend(self, model: Transformer, params: PyTree, tokens: Int[Array, " B"], state: State) -> Step:
        """As `generate.Baseline.extend`."""
        slots, layers = state.rows[0].held.shape[1], model.config.num_layers
        revive = slots if self.revive is None else self.revive
        most = [min(slots, 1 + revive)] * layers
        grown = State(state.rows, state.length + 1, state.left)
        x = embed(model, params, tokens[:, None], state.length[:, None])
        return self._run(model, params, x, state.length[:, None], grown, most)

    def _run(self, model, params, x: Float[Array, "B n D"], at, state: State, most: list[int]) -> Step:
        """Run the tokens `at`, the last of each sequence among them: (its logits, state, work).

        most: tokens that can run each layer.
        """
        plan, rows, last = model.plan, state.rows, state.length - 1
        slots = rows[0].held.shape[1]
        active = jnp.arange(slots) < state.length[:, None]
        scores, left, works = jnp.zeros(active.shape), [], []
        stages = zip(state.left, self.shares(plan.num_layers), strict=True)
        for layer, (behind, share) in enumerate(stages):
            if behind is not None:
                behind = dense.put(behind, x, at)
                count = jnp.asarray(dense.counts(share, slots))[state.length]
                room = most[layer] if layer <= plan.split else 1
                # The layer sees the best `count`, the last included. Of those without a row, at most `room`
                # run it, the last included.
                held, last_slot = rows[plan.reads[layer]].held, dense.one(slots, last)
                chosen = dense.best(jnp.where(last_slot, jnp.inf, scores), active, count)
                run = dense.best(scores, chosen & ~held & ~last_slot, room - 1) | last_slot
                active = (chosen & held) | run
                at = dense.in_order(run, room)
                x = dense.take(behind, at)
            entering = dense.only(x, at, last)
            x, at, rows, work = dense.run_layer(model, params, layer, x, at, rows, last, active)
            read = rows[plan.reads[layer]]
            scores = dense.importance(model, params, layer, entering, last[:, None], read, active)
            left.append(behind)
            works.append(work)
        out = dense.last_logits(model, params, x, at, last)
        return out, State(rows, state.length, tuple(left)), dense.by_layer(works)
