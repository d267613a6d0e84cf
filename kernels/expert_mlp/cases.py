"""The calls that matter for expert MLPs: small ones to test, real ones to compile and time."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.causal_attention.shards import WHOLE, Shards
from swiftkv_jax.kernels.common.case import OFF, Results, untuned
from swiftkv_jax.kernels.common.case import Case as Base
from swiftkv_jax.kernels.common.pools import encode
from swiftkv_jax.kernels.expert_mlp.api import expert_mlp

NAMES = (
    "sums",
    "gradient of x",
    "gradient of weights",
    *(f"gradient of {w}" for w in ("gate", "up", "down")),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Base):
    """One call of `expert_mlp`.

    Attributes:
      tokens, experts, per_token, dim, ffn: sizes. rows: that the tokens are cut into.
      alike: whether all tokens choose the same experts. empty: experts that none chooses.
      gradient: whether the gradients are computed too. eight_bit: the dtype of experts with scales, or None.
    """

    operation = staticmethod(expert_mlp)

    tokens: int
    experts: int
    per_token: int
    dim: int
    ffn: int
    rows: int = 1
    alike: bool = False
    empty: int = 0
    gradient: bool = False
    eight_bit: str | None = None

    @property
    def options(self) -> dict:
        return {}

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def make(self, seed: int = 0) -> tuple[tuple, dict]:
        """x, chosen, weights, gate, up, down, their scales if they have any, and the gradient of the sums."""
        keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 6))
        shape = (self.rows, self.tokens // self.rows)

        def drawn(*shape, inputs: int = 1):
            return (jax.random.normal(next(keys), shape) * inputs**-0.5).astype(self.computed)

        x, slope = drawn(*shape, self.dim), drawn(*shape, self.dim)
        gate, up = (drawn(self.experts, self.dim, self.ffn, inputs=self.dim) for _ in range(2))
        down = drawn(self.experts, self.ffn, self.dim, inputs=self.ffn)
        scores = jax.random.normal(next(keys), (*shape, self.experts))
        scores = jnp.broadcast_to(scores[:1, :1], scores.shape) if self.alike else scores
        scores = scores.at[..., : self.empty].set(-jnp.inf)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(scores), self.per_token)
        experts = [gate, up, down]
        if self.eight_bit:
            rounded = [encode(jnp.swapaxes(w, 1, 2), jnp.dtype(self.eight_bit)) for w in experts]
            experts = [jnp.swapaxes(w, 1, 2) for w, _ in rounded] + [scale for _, scale in rounded]
        return (x, chosen, weights, *experts, slope), {}

    def by(self, implementation: str | None, shards: Shards = WHOLE) -> Callable:
        """A function from the arrays of `make` to the sums, with `gradient` to a tuple by NAMES."""
        run = functools.partial(expert_mlp, implementation=implementation, shards=shards)

        def both(x, chosen, weights, *rest):
            *experts, slope = rest
            trained = () if self.eight_bit else experts
            out, pull = jax.vjp(lambda x, w, *of: run(x, chosen, w, *(of or experts)), x, weights, *trained)
            return out, *pull(slope)

        return both if self.gradient else lambda *args: run(*args[:-1])

    @property
    def tolerances(self) -> Mapping[str, float]:
        names = NAMES[1:3] if self.eight_bit else NAMES[1:]
        gradients = dict.fromkeys(names, self.tolerance if self.computed == "float32" else OFF)
        return {NAMES[0]: self.tolerance} | (gradients if self.gradient else {})

    def results(self, run: Callable) -> Results:
        found = run(*self.make()[0])
        return Results(dict(zip(NAMES, found if self.gradient else (found,), strict=False)))

    def expected(self) -> dict[str, jax.Array]:
        x, chosen, *rest = self.make()[0]
        wide = (x.astype(jnp.float32), chosen, *(y.astype(jnp.float32) for y in rest))
        return self.results(lambda *_: untuned(self.by("reference"))(*wide)).parts

    @property
    def flops(self) -> float:
        """FLOPs of the chosen experts."""
        return 6.0 * self.tokens * self.per_token * self.dim * self.ffn * (3 if self.gradient else 1)

    @property
    def bytes(self) -> float:
        """Tokens are read and written once, and the experts that can be chosen read once."""
        experts = min(self.experts - self.empty, self.tokens * self.per_token)
        each = jnp.dtype(self.eight_bit or self.computed).itemsize
        tokens = 2 * self.tokens * self.dim * jnp.dtype(self.computed).itemsize
        return float(3 * experts * self.dim * self.ffn * each + tokens)


_SMALL = Case(tokens=40, experts=8, per_token=3, dim=12, ffn=20, gradient=True)

SMALL = {
    "plain": _SMALL,
    "one_token": dataclasses.replace(_SMALL, tokens=1),
    "fewer_than_experts": dataclasses.replace(_SMALL, tokens=2, per_token=1),
    "all_on_one": dataclasses.replace(_SMALL, tokens=300, per_token=1, alike=True),
    "empty_experts": dataclasses.replace(_SMALL, empty=5),
    "every_expert": dataclasses.replace(_SMALL, per_token=8),
    "larger_tiles": dataclasses.replace(_SMALL, tokens=2600, experts=4, rows=2),
    "more_than_a_group_takes": dataclasses.replace(_SMALL, tokens=2 * 2050, per_token=1, rows=2),
    "bfloat16": dataclasses.replace(_SMALL, tokens=64, computed="bfloat16"),
    "int8": dataclasses.replace(_SMALL, eight_bit="int8"),
    "fp8": dataclasses.replace(_SMALL, eight_bit="float8_e4m3fn", tokens=64, computed="bfloat16"),
}

# DeepSeek-V2-Lite (arXiv 2405.04434): a layer, 4096 tokens of prompts, 32 sequences that decode, and one.
_V2_LITE = Case(tokens=4096, experts=64, per_token=6, dim=2048, ffn=1408, computed="bfloat16")

REAL = {
    "v2_lite": _V2_LITE,
    "v2_lite_decode": dataclasses.replace(_V2_LITE, tokens=32),
    "v2_lite_one": dataclasses.replace(_V2_LITE, tokens=1),
    "v2_lite_int8": dataclasses.replace(_V2_LITE, eight_bit="int8"),
    "v2_lite_decode_fp8": dataclasses.replace(_V2_LITE, tokens=32, eight_bit="float8_e4m3fn"),
    "mixtral_8x7b": dataclasses.replace(_V2_LITE, experts=8, per_token=2, dim=4096, ffn=14336),
    "qwen3_30b_a3b": dataclasses.replace(_V2_LITE, experts=128, per_token=8, ffn=768),
}
