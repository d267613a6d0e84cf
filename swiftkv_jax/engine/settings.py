"""Engine settings, the checks on them, and the pool of pages that they describe."""

import dataclasses
import os
import typing
from collections.abc import Callable
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxlib import xla_client

from swiftkv_jax.common.checks import Checked, Count, Flag, Natural, above, choice, integer, number, one_of
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.processes import least as least_of_all
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import ENCODER
from swiftkv_jax.core import weights
from swiftkv_jax.core.cache import EIGHT_BIT, Cache
from swiftkv_jax.core.loop import step
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted, cached, transformers
from swiftkv_jax.core.surgery import fold_shared_norm
from swiftkv_jax.engine.loop import Exits
from swiftkv_jax.engine.score import SHORTEST, scores
from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION
from swiftkv_jax.kernels.common.dispatch import PLATFORM_OF, ByKind, UnsupportedError
from swiftkv_jax.kernels.fused_kv_fill.api import FUSED_KV_FILL
from swiftkv_jax.kernels.fused_kv_fill.cases import UNFUSED
from swiftkv_jax.kernels.page_write.api import PAGE_WRITE
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION

CACHE_DTYPES = ("float32", "bfloat16", "float16", *EIGHT_BIT)
MEMORY_FRACTION = 0.9
_USUAL_SHARE = 0.75  # of a GPU, which JAX takes unless the environment says otherwise
DRAFTERS = ("prompt", "exit")
AUTO, SAFE = "auto", "xla"  # of `kernels`: as checked on this machine; the safe ones
SCORING = {name: CAUSAL_ATTENTION[name] for name in ("reference", "xla", "cudnn")}
OPERATIONS = {  # as `kernels` calls them; "attention" is decode and chunk
    "decode": PAGED_ATTENTION,
    "chunk": PAGED_ATTENTION,
    "fill": (UNFUSED, *FUSED_KV_FILL),
    "write": PAGE_WRITE,
    "scoring": SCORING,
}


def named(text: str) -> tuple[dict[str, str], set[str]]:
    """Parse "NAME,operation=NAME,...": return (operation -> implementation, the operations that were named).

    An entry for one operation overrides an entry for all; of two such entries the first counts.
    """
    for_all: dict[str, str] = {}
    for_one: dict[str, str] = {}
    for part in text.split(","):
        operation, equals, name = (word.strip() for word in part.rpartition("="))
        if equals:
            choice("kernels: the operation", operation, ("attention", *OPERATIONS))
            operations = ("decode", "chunk") if operation == "attention" else (operation,)
            choice(f"kernels: {operation}", name, OPERATIONS[operations[0]])
            for_one = dict.fromkeys(operations, name) | for_one
        elif name != AUTO:  # the default of what is not named
            choice("kernels", name, [AUTO, *dict.fromkeys(n for table in OPERATIONS.values() for n in table)])
            having = [known for known, table in OPERATIONS.items() if name in table]
            for_all = dict.fromkeys(having, name) | for_all
    return for_all | for_one, set(for_one)


def _kernels(name: str, value) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a string, not {value!r}")
    named(value)
    return value


Limit = Annotated[int | None, partial(integer, least=1)]


@typing.no_type_check  # user input: its own checks below name the field
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """The settings of an engine. Only `cache_dtype` and `exit_threshold` change what is computed; sizes and
    kernels change rounding, which in bfloat16 may change a greedy token (see `batch_invariant`).

    A value out of its range, or of another type, is a UsageError.

    Attributes:
      max_model_len: most tokens of prompt and completion together.
      max_source_len: most positions of an encoder's input; None: the encoder's own context.
      max_num_seqs: most sequences that run at once.
      max_num_batched_tokens: most tokens in one step.
      steps_per_launch: most tokens a sequence decodes before the host checks stop strings, and before the
        prompt of a new request is processed. They are sent in two launches, so the device never waits for
        the host.
      page_size: tokens per page; prompts share whole pages. The default of `LLM` is 64, or 128 for 8-bit
        rows on a TPU.
      num_pages: pages in the cache. None: enough for `max_num_seqs` full contexts, or what `memory_fraction`
        of the device's memory leaves beside the weights, if that is less.
      memory_fraction: share of the device's memory that weights, programs and cache may take.
      cache_dtype: "auto" (the model's), a float dtype, or the 8-bit "float8_e4m3fn" or "int8".
      prefix_caching: keep full pages for prompts with the same beginning.
      kernels: implementations of the operations. "auto": on GPUs and TPUs the fastest that a check on this
        machine found correct, elsewhere the platform's choice. "xla": the safe ones. Or names,
        "NAME,...", each for every operation that has it, or "decode=NAME", "chunk=NAME", "attention=NAME" (of
        both), "fill=NAME" (of a prompt's upper rows in whole pages; "unfused": by XLA, token by token),
        "write=NAME" (of new rows to their pages), "scoring=NAME" (of whole prompts; unnamed: the model's own
        attention, in blocks of queries), and "auto" for the rest. An LLM's have the names that were chosen.
      drafts: number of draft tokens to verify at once (speculative decoding); 0: none.
      drafter: where drafts come from: "prompt" (what followed the same words before) or "exit" (the model's
        exit head, inside a decode launch).
      batch_invariant: make a request's tokens independent of other requests, also in bfloat16: every launch
        is padded to `max_num_batched_tokens` prompt tokens or `max_num_seqs` decoding sequences, and no
        sequence is preempted. Slower. False: rounding may depend on the batch.
      exit_threshold: an exit-head token with a higher probability than this is accepted without verification
        (SwiftKV paper, B.4: 0.95). Lossy: such tokens are not always the model's. None: off.
    """

    max_model_len: Count
    max_source_len: Limit = None
    max_num_seqs: Count = 16
    max_num_batched_tokens: Count = 2048
    steps_per_launch: Count = 8
    page_size: Count = 64
    num_pages: Limit = None
    memory_fraction: Annotated[float, partial(above, least=0, most=1)] = MEMORY_FRACTION
    cache_dtype: Annotated[str, one_of("auto", *CACHE_DTYPES)] = "auto"
    prefix_caching: Flag = True
    kernels: Annotated[str, _kernels] = AUTO
    drafts: Natural = 0
    drafter: Annotated[str, one_of(*DRAFTERS)] = "prompt"
    exit_threshold: Annotated[float | None, partial(number, least=0, most=1)] = None
    batch_invariant: Flag = False

    def __post_init__(self):
        super().__post_init__()
        if self.batch_invariant and (self.drafts or self.exit_threshold is not None):
            raise UsageError("batch_invariant takes no draft tokens: leave drafts and exit_threshold out")

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def implementations(self) -> dict[str, str]:
        """Operation -> the implementation that `kernels` names for it."""
        names = {} if self.kernels == SAFE else named(self.kernels)[0]
        return {operation: name for operation, name in names.items() if name != UNFUSED}

    @property
    def lookups(self) -> int:
        """The number of tokens drafted from the prompt."""
        return self.drafts if self.drafter == "prompt" else 0

    @property
    def exits(self) -> Exits | None:
        """The uses of the exit head; None if there are none."""
        guesses = self.drafts - self.lookups
        return Exits(guesses, self.exit_threshold) if guesses or self.exit_threshold is not None else None


def usual_page(cache_dtype: str, platform: str) -> int:
    """Tokens of a page for rows that are stored so. A TPU's kernels take 8-bit pages whose scales are whole
    lanes; of others XLA would copy the scales at every step."""
    return 128 if platform == "tpu" and cache_dtype in EIGHT_BIT else Settings.page_size


def empty_pool(model: Transformer, settings: Settings, mesh: Mesh | None = None) -> Cache:
    """The engine's pool of `settings.num_pages` pages and the scratch page, for `mesh`; its own table is
    empty."""
    assert settings.num_pages is not None  # see `resolve`
    dtype = model.dtype if settings.cache_dtype == "auto" else settings.cache_dtype
    table, pages = jnp.zeros((1, 1), jnp.int32), settings.num_pages + 1
    page, dtype = settings.page_size, jnp.dtype(dtype)
    cache = Cache.create(model.config, model.plan, table, pages, page, dtype, settings.max_model_len)
    names = settings.implementations
    attention = ByKind(names.get("decode"), names.get("chunk"))
    by = {"attention": attention, "fill": names.get("fill"), "writer": names.get("write")}
    cache = dataclasses.replace(cache, **by, mesh=mesh)
    if model.config.encoder is None:
        return cache
    # Enough for the longest source in every lane, so that a sequence never waits for pages.
    longest = source_len(model.config, settings)
    count = 1 + settings.max_num_seqs * -(-longest // page)
    own = jnp.zeros((1, 1), jnp.int32)  # a donated array cannot be in two places
    cross = Cache.create(model.config, model.plan, own, count, page, dtype, longest, ENCODER)
    by |= {"attention": ByKind(*map(_any_place, (attention.decode, attention.chunk)))}
    return dataclasses.replace(cache, cross=dataclasses.replace(cross, **by, mesh=mesh))


def source_len(config: ModelConfig, settings: Settings) -> int:
    """The most positions that a source may have."""
    assert config.encoder is not None
    most = config.encoder.max_position_embeddings
    wanted = settings.max_source_len
    if wanted not in (None, most) and config.encoder.mels:
        raise UsageError(f"a window of audio has {most} positions: leave max_source_len {wanted} out")
    if wanted is not None and config.encoder.learned_positions:
        integer("max_source_len", wanted, 1, most)
    return most if wanted is None else wanted


def _any_place(name: str | None) -> str | None:
    """The implementation that reads sources, given the one that reads tokens. Chip kernels were only checked
    with rising positions in a block, and all queries of a source are at its end."""
    return "xla_one_turn" if name in PLATFORM_OF and name != "native_cpu" else name


def check_fill(model: Transformer | Predicted, kernels: str = AUTO, **rest: object) -> None:
    """Check that every part of `model` supports the fill that is asked for, among other settings."""
    auxiliary = transformers(model)[1:]
    if "fill" in named(kernels)[1] and any(part.plan.has_fill for part in auxiliary):
        raise UsageError(f"fill {kernels!r} cannot make the auxiliary's upper rows: name no fill")


def of_auxiliary(settings: Settings) -> Settings:
    """Settings for an auxiliary model, which reads prompts. Kernels are named and checked for the base alone;
    without a name a GPU or TPU uses XLA's."""
    return dataclasses.replace(settings, kernels=AUTO)


def empty_pools(
    model: Transformer | Predicted, settings: Settings, mesh: Mesh | None = None
) -> tuple[Cache, ...]:
    """The engine's pool and, under KV prediction, the auxiliary model's."""
    own, *auxiliary = cached(model)
    ahead = of_auxiliary(settings)
    return (empty_pool(own, settings, mesh), *(empty_pool(part, ahead, mesh) for part in auxiliary))


def resolve(
    settings: Settings,
    whole: Transformer | Predicted,
    devices: list,
    mesh: Mesh | None = None,
    working: Callable[[Settings], int] = lambda settings: 0,
) -> Settings:
    """Return `settings` with `num_pages` set, for a model on these devices; several devices have a `mesh`.

    `working` returns the bytes on each device that the largest program takes beside weights and pools. It is
    called where a device's memory is known and `num_pages` is not.
    """
    model, *auxiliary = transformers(whole)
    _check_model(settings, model, bool(auxiliary), len(devices))
    least, pages = settings.pages_per_sequence, settings.num_pages
    smallest = dataclasses.replace(settings, num_pages=1)
    if settings.implementations:
        _try_kernels(smallest, model, mesh)
        for part in auxiliary:
            _try_kernels(of_auxiliary(smallest), part, mesh)
    if pages is None:
        two = jax.eval_shape(partial(empty_pools, whole, smallest, mesh))  # one page, and scratch
        size = sum(pool.bytes_on_each for pool in two)
        sources = sum(pool.cross.bytes_on_each for pool in two if pool.cross is not None)
        own = next(device for device in devices if device.process_index == jax.process_index())
        free = _free_bytes(own, settings.memory_fraction, partial(working, smallest)) - sources
        pages = max(0, min(settings.max_num_seqs * least, int(2 * free / size) - 1))
        if len({device.process_index for device in devices}) > 1:
            pages = least_of_all(pages)
    if pages < least:
        need = f"max_model_len {settings.max_model_len} needs {least} pages, and there are {pages}"
        raise UsageError(f"{need}: raise num_pages or memory_fraction, or lower max_model_len")
    return dataclasses.replace(settings, num_pages=pages)


def _check_model(settings: Settings, model: Transformer, auxiliary: bool, devices: int) -> None:
    """Raises UsageError: a setting is not for such a model, with an auxiliary or not, on so many devices."""
    config, plan, names = model.config, model.plan, settings.implementations
    scoring, fill = names.get("scoring"), names.get("fill")
    if settings.drafter == "exit" and not settings.drafts:
        raise UsageError("drafter 'exit' needs drafts of 1 or more, not 0")
    if settings.exits and not config.exit_head:
        item = "drafter 'exit'" if settings.drafter == "exit" else f"exit_threshold {settings.exit_threshold}"
        raise UsageError(f"{item} needs an exit head: train one with train.py --set loss.exit_weight=1.0")
    if settings.max_source_len is not None and config.encoder is None:
        raise UsageError(f"max_source_len is of an encoder, and {config.family} has none: leave it out")
    if devices > 1 and scoring in PLATFORM_OF:  # only attention over pages is sharded by kv head
        raise UsageError(f"scoring {scoring!r} runs on one device, not on {devices}: give xla, or None")
    if auxiliary and scoring is not None:
        raise UsageError(f"scoring {scoring!r} is for one model, and an auxiliary reads prompts: give None")
    if auxiliary and settings.batch_invariant:
        raise UsageError("batch_invariant is for one model, and an auxiliary reads prompts: leave it out")
    if fill and plan.has_fill and not config.fused_fill:
        raise UsageError(f"fill {fill!r} does not support {config.family}: leave it out")
    if fill and not plan.has_fill:
        stored = f"{plan.kind} with rows of form {', '.join(plan.named.forms)}"
        raise UsageError(
            f"fill {fill!r} makes rows of form kv of a SwiftKV model; this is {stored}: give None"
        )


def _try_kernels(settings: Settings, model: Transformer, mesh: Mesh | None) -> None:
    """Trace the longest step, one token in all lanes, and a score, so that a named kernel refuses now."""
    pool = jax.eval_shape(partial(empty_pool, model, settings, mesh))
    params = weights.abstract(model.config, model.plan, model.dtype, cuts=None)
    names = settings.implementations
    if "fill" in names:
        params = jax.eval_shape(partial(fold_shared_norm, model), params)

    def whole(*shape: int):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    chunk = whole(settings.max_num_batched_tokens), whole(2), whole(1)
    score = partial(scores, model, settings.max_model_len, settings.cache_dtype, names.get("scoring"), 0)
    try:
        for tokens, starts, survivors in (chunk, (whole(settings.max_num_seqs), None, None)):
            jax.eval_shape(partial(step, model), params, tokens, tokens, starts, survivors, pool)
        if model.config.encoder is None:
            jax.eval_shape(score, params, whole(1, SHORTEST), whole(SHORTEST))
    except UnsupportedError as error:
        raise UsageError(f"{error}; change that, or give --kernels another") from None


def _free_bytes(device, fraction: float, working: Callable[[], int]) -> float:
    """The bytes that `fraction` of a device's memory leaves beside what is in use and what programs take.

    On a CPU, half of that fraction of what is free.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        ours = min(1.0, fraction / share_of(device)) * stats["bytes_limit"]
        return ours - stats.get("bytes_in_use", 0) - working()
    if device.platform != "cpu":  # as with XLA_PYTHON_CLIENT_ALLOCATOR=platform
        advice = "give num_pages (--num-pages), or unset XLA_PYTHON_CLIENT_ALLOCATOR"
        raise UsageError(f"this {device.platform} does not say how much memory it has: {advice}")
    return fraction / 2 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def share_of(device) -> float:
    """The part of a device's memory that `bytes_limit` covers: on a GPU, what JAX was told to take."""
    if device.platform != "gpu":
        return 1.0
    options: dict[str, typing.Any] = dict(xla_client.generate_pjrt_gpu_plugin_options())
    return options.get("memory_fraction", _USUAL_SHARE)
