"""How an engine runs: its settings, the checks on them, and the pool of pages they make."""

import dataclasses
import os
import sys
from functools import partial

import jax
import jax.numpy as jnp

from swiftkv_jax import page_fill
from swiftkv_jax import params as weights
from swiftkv_jax.cache import EIGHT_BIT, Cache
from swiftkv_jax.engine.loop import Exits
from swiftkv_jax.engine.scheduler import Demand
from swiftkv_jax.engine.score import SHORTEST, scores
from swiftkv_jax.errors import UsageError, suggest
from swiftkv_jax.kernels.dispatch import PLATFORM_OF, UnsupportedError
from swiftkv_jax.kernels.fused_kv_fill.api import FUSED_KV_FILL
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION
from swiftkv_jax.kernels.prompt_attention.api import PROMPT_ATTENTION
from swiftkv_jax.model import Transformer, step

CACHE_DTYPES = ("float32", "bfloat16", "float16", *EIGHT_BIT)
DRAFTERS = ("prompt", "exit")
_KERNELS = {"attention": PAGED_ATTENTION, "fill": FUSED_KV_FILL, "scoring": PROMPT_ATTENTION}  # by setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine runs. None of it but `cache_dtype` and `exit_threshold` changes a request's tokens.

    Attributes:
      max_model_len: most tokens of prompt and completion together.
      max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens of one step.
      steps_per_launch: tokens a sequence decodes before the host looks at stop strings and new requests.
      page_size: tokens of a page; prompts share whole pages.
      num_pages: of the cache. None: enough for `max_num_seqs` full contexts, or what `memory_fraction` of
        the device's memory leaves beside the weights, if that is less.
      cache_dtype: "auto" (the model's), or a float type, or "float8_e4m3fn" or "int8", which round.
      prefix_caching: keep full pages, for prompts that begin the same way.
      attention: how pages are read: an implementation of kernels/paged_attention, by name; None: the
        platform's choice ("xla" where the model lies on several devices).
      fill: how a prompt's upper rows are made: whole pages at a time by an implementation of
        kernels/fused_kv_fill, by name; None: by XLA's composition, token by token.
      scoring: how whole prompts are read to be scored: an implementation of kernels/prompt_attention, by
        name; None: the model's own blocks of queries.
      drafts: tokens guessed and then checked at once; 0: none. drafter: who guesses them, "prompt" (what
        followed the same words before) or "exit" (the model's exit head, inside a decode launch).
      exit_threshold: a token to which the exit head gives more probability than this is its, and runs no
        further (SwiftKV paper, B.4: 0.95). Lossy: such tokens are not always the model's. None: off.
      max_queued_requests, max_queued_tokens, max_queued_output_tokens: what may wait: sequences, their known
        tokens, and what they may generate (`max_tokens` of each). Above these a request is refused; None: no
        bound.
    """

    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    steps_per_launch: int = 8
    page_size: int = 64
    num_pages: int | None = None
    memory_fraction: float = 0.9
    cache_dtype: str = "auto"
    prefix_caching: bool = True
    attention: str | None = None
    fill: str | None = None
    scoring: str | None = None
    drafts: int = 0
    drafter: str = "prompt"
    exit_threshold: float | None = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_queued_output_tokens: int | None = None

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def queue(self) -> Demand:
        """What may wait."""
        bounds = (self.max_queued_requests, self.max_queued_tokens, self.max_queued_output_tokens)
        return Demand(*(sys.maxsize if bound is None else bound for bound in bounds))

    @property
    def lookups(self) -> int:
        """Tokens guessed from the prompt."""
        return self.drafts if self.drafter == "prompt" else 0

    @property
    def exits(self) -> Exits | None:
        """What the exit head does; None: nothing."""
        guesses = self.drafts - self.lookups
        return Exits(guesses, self.exit_threshold) if guesses or self.exit_threshold is not None else None


def empty_pool(model: Transformer, settings: Settings) -> Cache:
    """The engine's pool of `settings.num_pages` pages and the scratch page; its own table is empty."""
    assert settings.num_pages is not None  # see `settle`
    dtype = model.dtype if settings.cache_dtype == "auto" else settings.cache_dtype
    table, pages = jnp.zeros((1, 1), jnp.int32), settings.num_pages + 1
    page, dtype = settings.page_size, jnp.dtype(dtype)
    cache = Cache.create(model.config, model.plan, table, pages, page, dtype, settings.max_model_len)
    return dataclasses.replace(cache, implementation=settings.attention, fill=settings.fill)


def settle(settings: Settings, model: Transformer, devices: list) -> Settings:
    """`settings` with `num_pages` a number, for a model on these devices.

    Raises:
      UsageError: an unknown `cache_dtype`, `attention`, `fill` or `drafter`, a kernel that cannot run this
        model here, an exit head that the model has not, or pages for less than one sequence.
    """
    _check_exits(settings, model)
    known = ("auto", *CACHE_DTYPES)
    if settings.cache_dtype not in known:
        near = suggest(settings.cache_dtype, known)
        raise UsageError(f"cache_dtype must be one of {', '.join(known)}, not {settings.cache_dtype!r}{near}")
    _check_kernels(settings, len(devices))
    if settings.attention is None and len(devices) > 1:  # kernels are not cut up by the compiler
        settings = dataclasses.replace(settings, attention="xla")
    least, pages = settings.pages_per_sequence, settings.num_pages
    if pages is None:
        one = jax.eval_shape(partial(empty_pool, model, dataclasses.replace(settings, num_pages=0)))
        room = int(_free_bytes(devices[0], settings.memory_fraction) / one.nbytes) - 1
        pages = min(settings.max_num_seqs * least, room)
    if pages < least:
        raise UsageError(
            f"{pages} pages of {settings.page_size} tokens cannot hold one sequence of max_model_len "
            f"{settings.max_model_len}: {least} are needed; raise num_pages or memory_fraction, or lower "
            "max_model_len"
        )
    settings = dataclasses.replace(settings, num_pages=pages)
    if any(getattr(settings, name) for name in _KERNELS):
        _try_kernels(settings, model)
    return settings


def _check_kernels(settings: Settings, devices: int) -> None:
    for name, table in _KERNELS.items():
        given = getattr(settings, name)
        if given not in (None, *table):
            near = suggest(given, table)
            raise UsageError(f"{name} must be one of {', '.join(table)}, not {given!r}{near}")
        if devices > 1 and given in PLATFORM_OF:
            whole = ", ".join(n for n in table if n not in PLATFORM_OF)
            raise UsageError(
                f"{name} {given!r} runs on one device, and the model lies on {devices}: {whole}, or None"
            )


def _try_kernels(settings: Settings, model: Transformer) -> None:
    """Trace the longest step, a token of all lanes, and a score: what a named kernel refuses is told now."""
    pool = jax.eval_shape(partial(empty_pool, model, settings))
    params = weights.abstract(model.config, model.plan, model.dtype)
    if settings.fill is not None:
        params = jax.eval_shape(lambda tree: page_fill.fold(model.plan, tree, model.dtype), params)

    def whole(*shape: int):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    chunk = whole(settings.max_num_batched_tokens), whole(2), whole(1)
    score = partial(scores, model, settings.max_model_len, settings.scoring)
    try:
        for tokens, starts, survivors in (chunk, (whole(settings.max_num_seqs), None, None)):
            jax.eval_shape(partial(step, model), params, tokens, tokens, starts, survivors, pool)
        jax.eval_shape(score, params, whole(1, SHORTEST), whole(SHORTEST))
    except UnsupportedError as error:
        raise UsageError(str(error)) from None


def _check_exits(settings: Settings, model: Transformer) -> None:
    drafter, threshold = settings.drafter, settings.exit_threshold
    if drafter not in DRAFTERS:
        near = suggest(str(drafter), DRAFTERS)
        raise UsageError(f"drafter must be one of {', '.join(DRAFTERS)}, not {drafter!r}{near}")
    if threshold is not None and (
        isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1
    ):
        raise UsageError(f"exit_threshold must be a probability in [0, 1], or None, not {threshold!r}")
    if drafter == "exit" and not settings.drafts:
        raise UsageError("drafter 'exit' guesses nothing while drafts is 0; set drafts to 1 or more")
    if settings.exits and not model.config.exit_head:
        asked = "drafter 'exit'" if drafter == "exit" else f"exit_threshold {threshold}"
        raise UsageError(
            f"{asked} needs an exit head, and this model has none; train one with train.py --set "
            "loss.exit_weight=1.0"
        )


def _free_bytes(device, fraction: float) -> float:
    """What `fraction` of a device's memory leaves beside what is in use; on a CPU, half of what is free."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return fraction * stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return fraction / 2 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
