"""Sampling on the device: logits to tokens, each lane with its own parameters and random stream."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt

from swiftkv_jax.core.pytree import pytree
from swiftkv_jax.core.shapes import Array, Bool, Float, Int
from swiftkv_jax.engine.request import MAX_LOGPROBS, MOST_STOPS
from swiftkv_jax.engine.sequence import BAD, NONE_LEFT, Sequence
from swiftkv_jax.kernels.common.dispatch import device

NO_ID = -1  # pads stop ids; no token has it
_PLAIN = (  # numbers of a lane that SamplingParams has under the same names
    *("temperature", "top_k", "top_p", "min_p", "min_tokens", "max_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


class Mode(NamedTuple):
    """The sampling features that a launch is compiled with; lanes that need fewer are unaffected."""

    sampled: bool = False
    penalised: bool = False
    biased: bool = False
    logprobs: bool = False

    def covers(self, other: "Mode") -> bool:
        """Whether lanes that need `other` can run in this mode."""
        return all(mine or not theirs for mine, theirs in zip(self, other, strict=True))


@pytree
class Policy:
    """Each lane's sampling parameters; stop ids are padded with NO_ID, seeds are high and low words.

    numpy arrays where the host fills them in, jax arrays in a launch. `bias` is of zero width when no lane is
    biased.
    """

    temperature: Float[Any, " Q"]
    top_k: Int[Any, " Q"]
    top_p: Float[Any, " Q"]
    min_p: Float[Any, " Q"]
    repetition_penalty: Float[Any, " Q"]
    presence_penalty: Float[Any, " Q"]
    frequency_penalty: Float[Any, " Q"]
    seed: UInt[Any, "Q 2"]
    stop_ids: Int[Any, "Q I"]
    min_tokens: Int[Any, " Q"]
    max_tokens: Int[Any, " Q"]
    bias: Float[Any, "Q V"]


def needed(sequences: list[Sequence]) -> Mode:
    """The mode that these sequences' parameters need."""
    requests = [sequence.request for sequence in sequences]
    params = [request.params for request in requests]
    return Mode(
        sampled=not all(p.greedy for p in params),
        penalised=any(p.penalised for p in params),
        biased=any(request.biased for request in requests),
        logprobs=any(p.logprobs is not None for p in params),
    )


class Seats:
    """The parameters of the sequence in each lane, in arrays of the host; empty lanes are greedy."""

    def __init__(self, lanes: int, vocab_size: int):
        self._vocab_size = vocab_size
        fields = {name: np.zeros(lanes, np.float32) for name in _PLAIN}
        fields |= {name: np.ones(lanes, np.float32) for name in ("top_p", "repetition_penalty")}
        fields |= {name: np.zeros(lanes, np.int32) for name in ("top_k", "min_tokens", "max_tokens")}
        fields |= {"seed": np.zeros((lanes, 2), np.uint32), "bias": np.zeros((lanes, 0), np.float32)}
        self._all = Policy(**fields, stop_ids=np.full((lanes, MOST_STOPS), NO_ID, np.int32))
        self._gathered: dict[tuple, Policy] = {}

    def take(self, sequence: Sequence) -> None:
        """Write a sequence's parameters into its lane."""
        p, row = sequence.request.params, sequence.lane
        seed, stops = sequence.seed % 2**64, sequence.request.stop_ids[:MOST_STOPS]
        for name in _PLAIN:
            getattr(self._all, name)[row] = getattr(p, name)
        self._all.seed[row] = seed >> 32, seed & 0xFFFFFFFF
        self._all.stop_ids[row] = stops + (NO_ID,) * (MOST_STOPS - len(stops))
        self._gathered = {}

    def policy(self, sequences: list[Sequence], count: int, mode: Mode) -> Policy:
        """The policy of these sequences in arrays of `count` rows; memoised until `take` is called."""
        key = (tuple(s.lane for s in sequences), count, mode)
        if key not in self._gathered or any(s.request.biased for s in sequences):
            lanes = [s.lane for s in sequences] + [0] * (count - len(sequences))
            taken = {f.name: getattr(self._all, f.name)[lanes] for f in dataclasses.fields(Policy)}
            self._gathered[key] = Policy(**taken | {"bias": self._bias(sequences, count, mode)})
        return self._gathered[key]

    def loop_policy(self, sequences: list[Sequence], count: int, mode: Mode) -> Policy:
        """`policy`, but with at most one more token for sequences that the host must check token by token."""
        policy = self.policy(sequences, count, mode)
        most = policy.max_tokens.copy()
        for row, sequence in enumerate(sequences):
            if sequence.one_by_one:
                most[row] = len(sequence.output) + 1
        return dataclasses.replace(policy, max_tokens=most)

    def _bias(self, sequences: list[Sequence], count: int, mode: Mode) -> np.ndarray:
        bias = np.zeros((count, self._vocab_size if mode.biased else 0), np.float32)
        for row, s in enumerate(sequences if mode.biased else []):
            if s.request.params.allowed_token_ids is not None:
                bias[row] = -np.inf
                bias[row, list(s.request.params.allowed_token_ids)] = 0
            for token, value in dict(s.request.params.logit_bias or ()).items():
                bias[row, token] += value
            bias[row, s.forbidden()] = -np.inf
        return bias


@pytree
class TokenCounts:
    """The tokens that occur in each lane, [Q, V]; of zero width when no lane is penalised."""

    prompt: Bool[Array, "Q V"]
    output: Int[Array, "Q V"]

    @classmethod
    def of(
        cls, history: Int[Array, "Q S"], prompt: Int[Array, " Q"], length: Int[Array, " Q"], vocab: int
    ) -> "TokenCounts":
        """Count `history[q, :length[q]]`, of which the first `prompt[q]` are the prompt."""
        place = jnp.arange(history.shape[1])
        lane = jnp.arange(history.shape[0])[:, None]
        known, read = place < length[:, None], place < prompt[:, None]
        empty = jnp.zeros((history.shape[0], vocab), jnp.int32)
        prompts = empty.at[lane, history].add(read.astype(jnp.int32))
        return cls(prompts > 0, empty.at[lane, history].add((known & ~read).astype(jnp.int32)))

    def add(self, tokens: Int[Array, " Q"]) -> "TokenCounts":
        """Count one more output token in each lane; NO_ID is dropped."""
        if not self.output.shape[1]:
            return self
        nowhere = jnp.where(tokens < 0, self.output.shape[1], tokens)
        lane = jnp.arange(tokens.shape[0])
        return TokenCounts(self.prompt, self.output.at[lane, nowhere].add(1, mode="drop"))


@pytree
class Sampled:
    """A token for each lane, its log probability and rank, and the likeliest tokens (none if not wanted)."""

    token: Int[Array, " Q"]
    logprob: Float[Array, " Q"]
    rank: Int[Array, " Q"]
    top_ids: Int[Array, "Q top"]
    top_logprobs: Float[Array, "Q top"]


def sample(
    logits: Float[Array, "Q V"],
    policy: Policy,
    counts: TokenCounts,
    produced: Int[Array, " Q"],
    position: Int[Array, " Q"],
    mode: Mode,
) -> Sampled:
    """Sample the next token of each lane, for `position`, after `produced` output tokens.

    The order is vLLM's: ids ruled out or favoured, minimum length, penalties, temperature, min-p, top-k,
    top-p, then a draw by the Gumbel trick, whose noise depends on the lane's seed and the position alone.
    Where a logit is not finite the token is BAD; where every token is ruled out, NONE_LEFT.
    """
    raw = logits
    if mode.biased:
        logits = logits + policy.bias
    logits = forbid_ends(logits, policy, produced)
    if mode.penalised:
        logits = penalise(logits, policy, counts)
    token, best, sane = _likeliest(logits, jnp.isfinite(raw))
    if mode.sampled:
        scaled = logits / jnp.where(policy.temperature > 0, policy.temperature, 1.0)[:, None]
        filtered = (policy.min_p > 0) | (policy.top_k > 0) | (policy.top_p < 1)
        scaled = jax.lax.cond(
            (filtered & (policy.temperature > 0)).any(),
            lambda: jnp.where(kept(scaled, policy), scaled, -jnp.inf),
            lambda: scaled,
        )
        drawn, *_ = _likeliest(scaled + gumbel(policy.seed, position, logits.shape[1]))
        token = jnp.where(policy.temperature > 0, drawn, token)
        best = jnp.where(policy.temperature > 0, scaled.max(-1), best)
    lanes, none = len(token), jnp.zeros((len(token), 0))
    of_token = jnp.zeros(lanes), jnp.zeros(lanes, jnp.int32), none.astype(jnp.int32), none
    if mode.logprobs:
        of_token = logprobs_of(raw, token)
    if mode.biased or mode.sampled:
        token = jnp.where(best > -jnp.inf, token, NONE_LEFT)
    return Sampled(jnp.where(sane, token, BAD), *of_token)


def _likeliest(
    logits: Float[Array, "Q V"], sane: Bool[Array, "Q V"] | None = None
) -> tuple[Int[Array, " Q"], Float[Array, " Q"], Any]:
    """(the first token with each lane's largest logit, that logit, whether all of the lane is `sane`, [Q]).

    CPUs read the logits twice, since XLA's argmax is scalar code there; others read them once.
    """
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    if device()[0] == "cpu":
        best = logits.max(-1)
        token = jnp.where(logits == best[:, None], ids, ids[-1]).min(-1)
        return token, best, None if sane is None else sane.all(-1)

    def better(one, other):
        first = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
        larger, token = (jnp.where(first, *pair) for pair in zip(one[:2], other[:2], strict=True))
        return larger, token, *(a & b for a, b in zip(one[2:], other[2:], strict=True))

    arrays = [logits, jnp.broadcast_to(ids, logits.shape), *([] if sane is None else [sane])]
    start = [jnp.float32(-jnp.inf), ids[-1], *([] if sane is None else [True])]
    best, token, *rest = jax.lax.reduce(arrays, start, better, (1,))
    return token, best, rest[0] if rest else None


def logprobs_of(
    logits: Float[Array, "Q V"], token: Int[Array, " Q"], top: int = MAX_LOGPROBS
) -> tuple[Float[Array, " Q"], Int[Array, " Q"], Int[Array, "Q top"], Float[Array, "Q top"]]:
    """The log probability and rank of each token, the `top` likeliest ids, and their log probabilities."""
    whole = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1)
    ids, values = _top(logits, min(top, logits.shape[1]))
    return (chosen - whole)[:, 0], rank.astype(jnp.int32), ids, values - whole


def _top(logits: Float[Array, "Q V"], count: int) -> tuple[Int[Array, "Q top"], Float[Array, "Q top"]]:
    """The likeliest ids and their logits. On GPUs XLA sorts the vocabulary for more than 16."""
    first = min(count, 16) if device()[0] == "gpu" else count
    values, ids = jax.lax.top_k(logits, first)
    if first < count:
        others = logits.at[jnp.arange(len(ids))[:, None], ids].set(-jnp.inf)
        rest = jax.lax.top_k(others, count - first)
        values, ids = jnp.append(values, rest[0], axis=1), jnp.append(ids, rest[1], axis=1)
    return ids.astype(jnp.int32), values


def forbid_ends(
    logits: Float[Array, "Q V"], policy: Policy, produced: Int[Array, " Q"]
) -> Float[Array, "Q V"]:
    """Mask end-of-sequence and stop ids before `min_tokens`."""
    early = (produced < policy.min_tokens)[:, None] & (policy.stop_ids >= 0)
    ids = jnp.where(early, policy.stop_ids, logits.shape[1])
    if device()[0] != "cpu":  # without a pass of its own over the logits
        token = jnp.arange(logits.shape[1])
        hit = functools.reduce(jnp.logical_or, (token == ids[:, i, None] for i in range(ids.shape[1])))
        return jnp.where(hit, -jnp.inf, logits)
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")


def penalise(logits: Float[Array, "Q V"], policy: Policy, counts: TokenCounts) -> Float[Array, "Q V"]:
    """Repetition divides positive logits and multiplies negative ones; frequency and presence subtract."""
    seen = counts.output > 0
    factor = jnp.where(counts.prompt | seen, policy.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - policy.frequency_penalty[:, None] * counts.output
    return logits - policy.presence_penalty[:, None] * seen


def kept(logits: Float[Array, "Q V"], policy: Policy) -> Bool[Array, "Q V"]:
    """A mask of the tokens that remain after min-p, top-k and top-p, in this order; the most likely one
    always remains.

    Ties at a threshold are all kept, so the result does not depend on the order of tokens.
    """
    best = logits.max(-1, keepdims=True)
    keep = jnp.exp(logits - best) >= policy.min_p[:, None]
    logits = jnp.where(keep, logits, -jnp.inf)
    keys = _ordered_bits(logits)
    limited = policy.top_k > 0
    least = _threshold(keys, jnp.ones_like(logits), policy.top_k.astype(logits.dtype), limited)
    keep &= keys >= least[:, None]
    weights = jax.nn.softmax(jnp.where(keep, logits, -jnp.inf), axis=-1)
    return keep & (keys >= _threshold(keys, weights, policy.top_p, policy.top_p < 1)[:, None])


def _ordered_bits(x: Float[Array, "Q V"]) -> UInt[Array, "Q V"]:
    """uint32 keys in the order of float32 `x`: the bits of negative numbers are inverted, the others' sign
    bit is set."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(
    keys: UInt[Array, "Q V"],
    weights: Float[Array, "Q V"],
    target: Float[Array, " Q"],
    limited: Bool[Array, " Q"],
) -> UInt[Array, " Q"]:
    """The largest key t for which the keys >= t weigh at least `target` in total; 0 if all keys weigh less,
    and in lanes that are not `limited`.

    It is found a few bits at a time, in passes over the vocabulary instead of a sort, which is slow on
    accelerators; in none if no lane is limited. A CPU takes as long for each comparison, the others for each
    pass.
    """
    bits = 1 if device()[0] == "cpu" else 4

    def added(one, other):
        return [x + y for x, y in zip(one, other, strict=True)]

    def narrow(i, t):
        shift = (32 - bits * (i + 1)).astype(jnp.uint32)
        trials = [t | (jnp.uint32(digit) << shift) for digit in range(1, 1 << bits)]
        parts = [jnp.where(keys >= trial[:, None], weights, 0) for trial in trials]
        sums = jax.lax.reduce(parts, [jnp.zeros_like(weights, shape=())] * len(parts), added, (1,))
        digit = sum((weight >= target).astype(jnp.uint32) for weight in sums)  # a larger trial weighs less
        return jnp.where(limited, t | (digit << shift), t)

    none = jnp.zeros(keys.shape[0], jnp.uint32)
    return jax.lax.cond(limited.any(), lambda: jax.lax.fori_loop(0, 32 // bits, narrow, none), lambda: none)


def gumbel(seeds: UInt[Array, "Q 2"], positions: Int[Array, " Q"], vocab: int) -> Float[Array, "Q V"]:
    """Each lane's noise, from its seed and the position of the next token: independent of other lanes."""

    def one(seed, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32)  # whatever jax_enable_x64 says

    return jax.vmap(one)(seeds, positions)
