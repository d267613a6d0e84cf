"""The lines of a run in order of worth, each with the seconds that it is expected to take and may take."""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.device.engine import PLANS
from benchmarks.device.shapes import Shape, shape_of
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.engine.kernels import calls_of
from swiftkv_jax.engine.settings import Settings
from swiftkv_jax.kernels.check.calls import UNFUSED, known
from swiftkv_jax.kernels.check.decide import choose, contest
from swiftkv_jax.kernels.check.supervisor import Measurement
from swiftkv_jax.kernels.common.case import Call

# By task or part of it: expected on an H100, and at most.
SECONDS = {"hardware": (8, 60), "ceilings": (8, 60), "transformers": (40, 120)}
SECONDS |= {"engine, safe": (60, 150), "engine": (35, 120), "train": (30, 120)}
SECONDS |= {"decode": (12, 40), "chunk": (16, 40), "fill": (8, 40), "keys": (10, 40), "attention": (15, 60)}
SECONDS |= {"teacher": (60, 150), "student": (120, 600)}
STANDARD, HALF, SHARED = PLANS
TEACHER, STUDENT = "SmolLM2: chats", "SmolLM2: student at 50 %"
PAGE, PAGES = 64, (64, 128)
# XLA's own choice of what goes into command buffers: without loops, which the engine adds.
BY_THE_HOST = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+CUDNN"}


def line(name: str, task: str, args: Mapping, kind: str = "", group: str = "jax", **env: str) -> Measurement:
    """A line with the seconds of its kind."""
    expected, limit = SECONDS[kind or task]
    return Measurement(name, task, args, float(limit), float(expected), group, env)


def label(call: Call) -> str:
    """What a kind of call is named in lines: with the rows that are read, if these are special."""
    special = {"k_cache_attention": "keys alone, ", "x_cache_attention": "inputs alone, "}
    rows = special.get(call.operation, "")
    if call.kind == "decode" and not rows and call.heads == call.kv_heads:
        rows = "keys and values, "
    eight = "fp8, " if call.stored.startswith("float8") else ""
    return f"{call.kind}, {rows}{eight}page {call.page}"


def calls(shape: Shape, page: int = PAGE, dtype: str = "auto") -> dict[str, Call]:
    """The calls of an engine of this shape, by kind; of attention over half of `max_model_len` tokens."""
    (requests, prompt), _ = shape.requests
    sizes = {"max_model_len": 2 * prompt, "max_num_seqs": requests, "max_num_batched_tokens": shape.budget}
    settings, layers = Settings(**sizes, page_size=page, cache_dtype=dtype), shape.config.num_layers
    plan = KVPlan.swiftkv(layers, layers // 2)
    return {call.kind: call for call in calls_of(shape.config, plan, shape.dtype, settings)}


def calls_of_rows(shape: Shape) -> list[Call]:
    """Decoding from keys and values, from keys alone and from inputs alone, with as many heads of each."""
    heads, both = shape.heads, calls(shape)["decode"]
    both = dataclasses.replace(both, heads=heads, kv_heads=heads)
    keys, inputs = heads * both.width, shape.config.hidden_size
    alone = dataclasses.replace(both, operation="k_cache_attention", row=keys)
    return [both, alone, dataclasses.replace(both, operation="x_cache_attention", row=inputs, rope=False)]


def training_call(shape: Shape) -> Call:
    """The attention of one of the rows that the distillation step packs."""
    config = shape.trained
    heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "width": config.head_dim}
    dtypes = {"computed": shape.trained_dtype, "stored": shape.trained_dtype}
    tokens = dict.fromkeys(("page", "capacity", "tokens"), shape.row)
    return Call(kind="train", operation="causal_attention", lanes=1, **heads, **dtypes, **tokens)


def order(
    name: str,
    lines: Mapping[str, dict],
    model: Sequence[str] = (),
    files: Mapping[str, str] = types.MappingProxyType({}),
    left: Callable[[], float] = lambda: 0.0,
    torch: bool = True,
    winner: Callable[[str, Sequence[str], Mapping[str, dict]], str] = choose,
) -> Iterator[Measurement]:
    """The lines of the shape `name`, each made when the ones before have run.

    Args:
      lines: the results so far, by name. model: the parts of a GGUF file, or a folder; without it no student
        is made. files: where its tasks put files. left: seconds left, all of which the student gets. torch:
        whether transformers' model can run. winner: as `decide.choose`.
    """
    shape = shape_of(name)
    (requests, prompt), long = shape.requests

    def examined(call: Call) -> Iterator[Measurement]:
        """Every candidate, checked, and if right timed beside the first right one."""
        kind = "keys" if call.row or call.heads == call.kv_heads else call.kind
        kind = "attention" if call.kind == "train" else kind
        for title, args in contest(call, label(call), known(call, shape.candidates[call.kind]), lines):
            yield line(title, "examine", args, kind)

    def won(call: Call) -> str:
        return winner(label(call), known(call, shape.candidates[call.kind]), lines)

    def engine(
        plan: str, decode: str, chunk: str, sizes=(requests, prompt), dtype="auto", fill=None
    ) -> Measurement:
        safe = decode == shape.candidates["decode"][0] and chunk == shape.candidates["chunk"][0]
        eight = ", fp8 rows" if dtype != "auto" else ""
        made = f", fill {fill}" if fill and plan != STANDARD else ""
        title = f"engine: {sizes[0]} x {sizes[1]}, {plan}{eight}, decode {decode}, chunk {chunk}{made}"
        args = {"shape": name, "plan": plan, "cache_dtype": dtype, "page": PAGE}
        args |= {"requests": sizes[0], "prompt": sizes[1], "decode": decode, "chunk": chunk, "fill": fill}
        return line(title, "engine", args, "engine, safe" if safe else "engine")

    def step(attention: str, remat: bool = False) -> Measurement:
        title = f"step: {attention}, {shape.documents} documents a row" + (", recomputed" if remat else "")
        args = {"shape": name, "attention": attention, "documents": shape.documents, "remat": remat}
        return line(title, "train", args)

    yield line("ceilings", "ceilings", {"shape": name})
    own, safe = calls(shape), {kind: names[0] for kind, names in shape.candidates.items()}
    for kind in ("decode", "chunk"):
        yield from examined(own[kind])
    best = {kind: won(own[kind]) for kind in ("decode", "chunk")}
    for plan in PLANS:
        yield engine(plan, **best)
    keys_and_values, keys, inputs = calls_of_rows(shape)
    for call in (keys_and_values, keys):
        yield from examined(call)
    for plan in (STANDARD, HALF):
        yield engine(plan, **best, sizes=long)
    yield from examined(training_call(shape))
    for attention in shape.candidates["train"]:
        yield step(attention)
    eight = calls(shape, dtype=shape.fp8)
    yield from examined(eight["decode"])
    yield engine(HALF, won(eight["decode"]), best["chunk"], dtype=shape.fp8)
    if model:
        given = {"model": model, "words": shape.words, **files}
        yield line(TEACHER, "teacher", given | {"count": shape.chats})
        how = {"steps": shape.steps, "rows": shape.batch, "seconds": left()}
        yield line(STUDENT, "student", given | how)
    if torch:
        args = {"shape": name, "requests": requests, "prompt": prompt}
        yield line("transformers", "transformers", args, group="torch")
    yield from examined(own["fill"])
    yield from examined(inputs)
    for kind in ("decode", "chunk"):
        yield from examined(calls(shape, page=PAGES[1])[kind])
    for plan in (STANDARD, HALF):
        yield engine(plan, safe["decode"], safe["chunk"])
    if (fill := won(own["fill"])) != UNFUSED:
        yield engine(HALF, **best, fill=fill)
    yield step(shape.candidates["train"][-1], remat=True)
    plain = engine(STANDARD, **best)
    yield dataclasses.replace(plain, name=f"{plain.name}, loops by the host", group="host", env=BY_THE_HOST)
