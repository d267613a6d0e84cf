"""The engine's programs compiled for chips that are not here: no weight is copied, no pool either, no layer
has a loop whose length is known only at run time, and on an H100 a step is few kernels.

Two layers of Llama-3.1-8B's widths, 64 lanes of 8448 tokens, in pages of the size that an LLM takes there,
with the kernels that are made for each chip.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernel_targets import HOPPER, TPUS, mesh_of, size

from swiftkv_jax.analysis.hlo import COLLECTIVES, launched
from swiftkv_jax.cli.serving_programs import KERNELS
from swiftkv_jax.config.hf import FULL_ATTENTION
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import RopeConfig
from swiftkv_jax.core import weights
from swiftkv_jax.core.cache import block_count
from swiftkv_jax.core.layers import by_token, linear
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Caches
from swiftkv_jax.core.rows import rounded
from swiftkv_jax.core.sharding import make_mesh
from swiftkv_jax.core.surgery import fold_shared_norm
from swiftkv_jax.distill import compile_only
from swiftkv_jax.distill.config import load_experiment
from swiftkv_jax.engine.loop import Inputs, Lanes, decode, read_ahead, run_any
from swiftkv_jax.engine.request import MOST_STOPS
from swiftkv_jax.engine.runner import MODES, working_bytes
from swiftkv_jax.engine.sampling import Mode, Policy, TokenCounts, sample
from swiftkv_jax.engine.settings import Settings, empty_pool, usual_page
from swiftkv_jax.kernels.paged_attention.xla import ONE_TURN_BYTES

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]

CHIPS = {"v5p": TPUS["v5p"], "h100": HOPPER}
FOUR = TPUS | {"h100": "h100:1x1x4"}
FILLS = dict.fromkeys(TPUS, "pallas_tpu") | {"h100": "pallas_gpu"}
NAMED = {chip: KERNELS["gpu" if chip == "h100" else "tpu"] for chip in FOUR}
GPU_OPERATIONS = {"decode": 60, "run_any": 90}  # of two layers
EACH_MORE = 15  # operations, of a layer more
DECODE_BYTES = 0.1 * 2**30  # by XLA's attention: scores, and weights in bfloat16
LANES, CONTEXT, TOKENS, STEPS = 64, 8448, 2048, 8
CONFIG = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    dtype="bfloat16",
)
CONFIGS = {2: CONFIG} | {n: dataclasses.replace(CONFIG, num_layers=n, windows=()) for n in (3, 4, 9)}
PLANS = {
    "standard": KVPlan.standard(2),
    "swiftkv": KVPlan.swiftkv(2, 1),
    "acrosskv": KVPlan.swiftkv(3, 1, 2),  # two upper layers, that one row serves
}
TAIL = KVPlan.swiftkv(2, 1, tail=8)


# Numbers that a token's products make in a layer: queries, keys, values and their mixture; the MLP's.
LOWER_LAYER = (32 + 2 * 8 + 32) * 128 + 2 * 14336 + 4096
THREE_UPPER = KVPlan.swiftkv(4, 1)  # rows that a fill makes at once
EIGHT_UPPER = KVPlan.swiftkv(9, 1)


def engine_arguments(
    chip: str,
    plan: KVPlan,
    rows: str,
    mesh: Mesh | None = None,
    attention: str | None = None,
    fill: str | None = None,
    dtype: str = "bfloat16",
    config: ModelConfig | None = None,
    eight_bit: str | None = None,
):
    """(model, params, cache, settings) as shapes, in the form that the engine serves, on one chip or those
    of `mesh`; by the chip's own kernel, or by `attention`; upper rows by `fill`; kernels in `eight_bit`."""
    config = config or CONFIGS[plan.num_layers]
    model = Transformer(config, plan, dtype)
    page = usual_page(rows, "gpu" if chip == "h100" else "tpu")
    sizes = {"max_model_len": CONTEXT, "max_num_seqs": LANES, "num_pages": LANES * CONTEXT // page}
    named = f"attention={attention}" if attention else NAMED[chip]
    named += f",fill={fill}" if fill else ""
    settings = Settings(**sizes, page_size=page, cache_dtype=rows, kernels=named)
    cache = jax.eval_shape(functools.partial(empty_pool, model, settings, mesh))
    params = weights.abstract(config, plan, dtype, mesh, None, eight_bit)
    return model, folded(model, params) if fill else params, cache, settings


def folded(model: Transformer, params):
    """`params` for a fused fill; each array lies where it lay before."""
    made = jax.eval_shape(functools.partial(fold_shared_norm, model), params)
    lower = params["rows"][: len(made["rows"]) - 1]
    before = {name: params[name] for name in made} | {"rows": [*lower, params["rows"][-1]]}
    return jax.tree.map(
        lambda s, old: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=old.sharding), made, before
    )


def whole(*shape: int):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def policy() -> Policy:
    number, integer = jax.ShapeDtypeStruct((LANES,), jnp.float32), whole(LANES)
    integers = ("top_k", "min_tokens", "max_tokens")
    arrays = {f.name: integer if f.name in integers else number for f in dataclasses.fields(Policy)}
    arrays |= {"seed": jax.ShapeDtypeStruct((LANES, 2), jnp.uint32), "stop_ids": whole(LANES, MOST_STOPS)}
    return Policy(**(arrays | {"bias": jax.ShapeDtypeStruct((LANES, 0), jnp.float32)}))


def a_step(rows: int, tokens: int, pages: int) -> Inputs:
    """The shapes of a step's inputs, with `pages` pages for each sequence."""
    return Inputs(
        tokens=whole(tokens),
        positions=whole(tokens),
        query_starts=whole(rows + 1),
        survivors=whole(rows),
        table=whole(rows, pages),
    )


def programs(*what, **more) -> dict:
    """Program -> (jitted function, static arguments, traced arguments)."""
    model, params, cache, settings = engine_arguments(*what, **more)
    pages = settings.pages_per_sequence
    table = whole(LANES, pages)
    lanes = Lanes(*[whole(LANES)] * 3, jax.ShapeDtypeStruct((LANES,), bool), whole(LANES, 0))
    return {
        "run_any": (run_any, (model,), (params, cache, a_step(LANES, TOKENS, pages))),
        "prompt": (run_any, (model,), (params, cache, a_step(1, TOKENS, pages))),
        "decode": (decode, (model, Mode(), STEPS), (params, cache, table, lanes, policy())),
        "ahead": (
            read_ahead,
            (model,),
            (params, Caches(cache), *[whole(TOKENS)] * 2, whole(LANES + 1), table),
        ),
    }


@functools.cache
def compiled(chip: str, plan: str, rows: str, program: str, attention: str | None = None):
    """(memory analysis, text of the optimised program, parameters, cache) on one chip."""
    mesh = mesh_of(CHIPS[chip])
    made = PLANS.get(plan, TAIL)
    function, static, traced = programs(chip, made, rows, attention=attention)[program]
    return *text_of(function, static, on(mesh, traced), mesh), *traced[:2]


@functools.cache
def compiled_for_four(chip: str, plan: KVPlan, rows: str, fill: str | None, program: str):
    """(memory analysis, text of the optimised program, cache) on four chips that share the heads."""
    mesh = make_mesh(tensor=4, devices=compile_only.topology(FOUR[chip])[1])
    function, static, (params, cache, *rest) = programs(chip, plan, rows, mesh, fill=fill)[program]
    lying = jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), cache, cache.shardings
    )
    return *text_of(function, static, (params, lying, *on(mesh, rest)), mesh), cache


def on(mesh: Mesh, shapes):
    """Shapes of arrays that every device has whole."""
    place = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes)


def text_of(function, static: tuple, traced, mesh: Mesh):
    """(memory analysis, text of the optimised program)."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        made, text = compile_only.compiled(function.lower(*static, *traced))
        return made.memory_analysis(), text


def copied_weights(hlo: str, params) -> list[str]:
    """Copies of arrays of a large parameter's size, in any order of its axes; and arrays of one or several
    matrices that are put together, or that anything in a loop writes except into a TPU's fast memory."""
    large = {tuple(sorted(d for d in leaf.shape if d > 1)) for leaf in jax.tree.leaves(params)}
    large = {dims for dims in large if math.prod(dims) >= 1 << 20}
    found = []
    for line in hlo.splitlines():
        made = re.search(r"= \(?\w+\[([\d,]*)\]\S* (?:copy|copy-start|transpose)\(", line)
        if made and sorted_dims(made[1]) in large:
            found.append(line.strip()[:160])
    matrices = [dims for dims in large if len(dims) == 2]
    for name, line, repeated in launched(hlo)[0]:
        made = re.match(r"%(\S+) = \w+\[([\d,]*)\](\S*)", line)
        if made is None or "S(1)" in made[3] or not (repeated or "concatenate" in made[1]):
            continue
        dims = sorted_dims(made[2])
        if LANES not in dims and (repeated or TOKENS not in dims) and has_matrices(dims, matrices):
            found.append(f"{name}: {line.strip()[:160]}")
    return found


def written_weights(hlo: str, params) -> list[str]:
    """Arrays of an 8-bit kernel's shape, in any dtype, that an operation writes, but into a TPU's fast
    memory in 8 bits."""
    eight_bit = [x for x in jax.tree.leaves(params) if x.dtype.itemsize == 1]
    local = [x.sharding.shard_shape(x.shape) if x.sharding else x.shape for x in eight_bit]
    shapes, found = {tuple(sorted(shape[-2:])) for shape in local}, []
    for _, line, _ in launched(hlo)[0]:
        result = result_of(line)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", result):
            fast = dtype in ("s8", "f8e4m3fn") and "S(1)" in result
            if sorted_dims(dims) in shapes and not fast:
                found.append(line.strip()[:160])
    return found


def result_of(line: str) -> str:
    """What of an operation's text says which arrays it writes."""
    result = line.partition(" = ")[2]
    return result.partition(") " if result.startswith("(") else " ")[0]


def sorted_dims(text: str) -> tuple[int, ...]:
    return tuple(sorted(d for d in map(int, filter(None, text.split(","))) if d > 1))


def has_matrices(dims: tuple[int, ...], matrices) -> bool:
    """Whether an array has one axis of a matrix, and the other in the rest."""
    pairs = [pair for one, other in matrices for pair in ((one, other), (other, one))]
    return any(one in dims and math.prod(dims) % (one * other) == 0 for one, other in pairs)


def multiplied(hlo: str) -> int:
    """Numbers that XLA's products make of each token of a step."""
    made = re.findall(r"= \w+\[([\d,]+)\]\S* (?:dot|convolution)\(", hlo)
    shapes = [[int(d) for d in dims.split(",")] for dims in made]
    return sum(math.prod(shape) for shape in shapes if TOKENS in shape) // TOKENS


def executed(hlo: str) -> tuple[collections.Counter, collections.Counter, list[bool]]:
    """Operations of a program by name, and those in its loops, once; of each loop, whether its length is
    known."""
    found, loops = launched(hlo)
    once, repeated = (
        collections.Counter(n for n, _, inside in found if inside == where) for where in (False, True)
    )
    return once, repeated, loops


def most_operations(program: str, plan: str) -> int:
    """That a program may have on an H100."""
    return GPU_OPERATIONS[program] + EACH_MORE * (PLANS[plan].num_layers - CONFIG.num_layers)


@pytest.mark.parametrize("program", ["run_any", "decode"])
@pytest.mark.parametrize(
    ("plan", "rows"), [*itertools.product(PLANS, ("bfloat16", "int8")), ("swiftkv", "float8_e4m3fn")]
)
@pytest.mark.parametrize("chip", CHIPS)
def test_no_weight_is_copied_and_no_layer_waits_for_the_host(chip, plan, rows, program):
    memory, hlo, params, cache = compiled(chip, plan, rows, program)
    assert not copied_weights(hlo, params)
    assert memory.alias_size_in_bytes >= cache.nbytes
    if chip == "v5p":  # keys and values of each row by the writer of pages
        assert len(re.findall(r"%page_write\S* = .* custom-call\(", hlo)) == 2 * cache.plan.num_rows
        assert not copied_weights(hlo, cache.stores)
        assert memory.temp_size_in_bytes < 2 * DECODE_BYTES
    once, each_step, loops = executed(hlo)
    assert loops.count(False) == (program == "decode")  # the loop over its steps
    if program == "decode":
        assert memory.temp_size_in_bytes < DECODE_BYTES
    if chip == "h100":
        found = each_step if program == "decode" else once
        assert sum(found.values()) <= most_operations(program, plan), found


@pytest.mark.parametrize("chip", CHIPS)
def test_what_is_read_ahead_of_a_tail_runs_the_layers_below_the_split_alone(chip):
    memory, hlo, params, caches = compiled(chip, "tail", "bfloat16", "ahead")
    assert not copied_weights(hlo, params) and False not in executed(hlo)[2]
    assert memory.alias_size_in_bytes >= caches.base.nbytes
    assert memory.temp_size_in_bytes < 2 * DECODE_BYTES
    assert multiplied(hlo) == LOWER_LAYER + 2 * 8 * 128


@pytest.mark.parametrize("mode", MODES[1:], ids=["sampled", "all"])
@pytest.mark.parametrize("chip", CHIPS)
def test_sampling_sorts_no_vocabulary(chip, mode):
    mesh, scores = mesh_of(CHIPS[chip]), jax.ShapeDtypeStruct((LANES, CONFIG.vocab_size), jnp.float32)
    counts = TokenCounts(jax.ShapeDtypeStruct(scores.shape, bool), whole(*scores.shape))
    traced = scores, dataclasses.replace(policy(), bias=scores), counts, whole(LANES), whole(LANES)
    text = text_of(jax.jit(functools.partial(sample, mode=mode)), (), on(mesh, traced), mesh)[1]
    assert " sort(" not in text and text.count(" conditional(") == 3  # filters run where a request has them


@pytest.mark.parametrize("tokens", [16, 2048])
@pytest.mark.parametrize(("chip", "eight_bit"), [("v5p", "int8"), ("h100", "float8_e4m3fn")])
def test_a_product_of_two_8_bit_arrays_converts_no_weight(chip, eight_bit, tokens):
    """Not inside an operation either; activations become 8-bit arrays, which they are not otherwise."""
    mesh, shape = mesh_of(CHIPS[chip]), (4096, 14336)
    x = jax.ShapeDtypeStruct((tokens, shape[0]), jnp.bfloat16)
    p = {
        "kernel": jax.ShapeDtypeStruct(shape, eight_bit),
        "scale": jax.ShapeDtypeStruct(shape[1:], jnp.float32),
    }
    both = jax.eval_shape(by_token, p)
    texts = [text_of(jax.jit(linear), (), on(mesh, (x, each)), mesh)[1] for each in (both, p)]
    assert not re.search(r"= (?:bf16|f16|f32)\[(?:4096,14336|14336,4096)\]", texts[0])
    assert [bool(re.search(rf"= (?:s8|f8e4m3fn)\[{tokens},4096\]", text)) for text in texts] == [True, False]


@pytest.mark.parametrize("program", ["run_any", "decode"])
@pytest.mark.parametrize("eight_bit", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("chip", CHIPS)
def test_no_program_makes_an_8_bit_weight_wide(chip, eight_bit, program):
    mesh = mesh_of(CHIPS[chip])
    function, static, traced = programs(chip, PLANS["swiftkv"], "bfloat16", eight_bit=eight_bit)[program]
    memory, hlo = text_of(function, static, on(mesh, traced), mesh)
    assert not written_weights(hlo, traced[0])
    assert memory.temp_size_in_bytes < DECODE_BYTES * (program == "decode" or 2)


def test_a_step_of_llama_405b_in_fp8_fits_8_h100():
    """2560 tokens of 16 sequences, and a cache of 16 x 8192 tokens in bfloat16. All 126 layers would compile
    for an hour, so what they hold is counted, and what a step takes beside is that of 2 and of 4 layers."""
    whole = load_experiment("llama405b_fp8").architecture
    mesh, beside = make_mesh(tensor=8, devices=compile_only.topology("h100:1x1x8")[1]), {}

    def arguments(layers: int):
        config = dataclasses.replace(whole, num_layers=layers, windows=())
        model = Transformer(config, KVPlan.swiftkv(layers, layers // 2), "bfloat16")
        sizes = {"max_model_len": 8192, "max_num_seqs": 16, "page_size": 64, "num_pages": 16 * 8192 // 64}
        settings = Settings(**sizes, kernels=NAMED["h100"])
        pool = jax.eval_shape(functools.partial(empty_pool, model, settings, mesh))
        pool = jax.tree.map(
            lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), pool, pool.shardings
        )
        params = weights.abstract(config, model.plan, "bfloat16", mesh, None, "float8_e4m3fn")
        inputs = on(mesh, a_step(16, 2560, settings.pages_per_sequence))  # no axis of a weight is so long
        return model, (params, pool, inputs)

    def held(traced) -> int:
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(traced)
        )

    for layers in (2, 4):
        model, traced = arguments(layers)
        memory, hlo = text_of(run_any, (model,), traced, mesh)
        assert not written_weights(hlo, traced[0])
        assert memory.argument_size_in_bytes == pytest.approx(held(traced), rel=1e-3)
        beside[layers] = memory.temp_size_in_bytes
    assert beside[4] < 1.02 * beside[2]
    needed = held(arguments(whole.num_layers)[1]) + beside[4]
    print(f"{needed / 2**30:.1f} GiB, of which {beside[4] / 2**30:.2f} beside weights and cache")
    assert needed < 62 * 2**30


@pytest.mark.parametrize("rows", ["bfloat16", "int8"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_decode_step_with_xla_attention_on_an_h100_copies_no_weight(plan, rows):
    """With XLA's attention a decode step has four operations in each layer, which read rows in place.

    With 8-bit rows each layer that writes has four more: the largest numbers of a key and of a value, by
    which these are scaled, and the writes of both scales. Fewer would need one array of keys and values.
    """
    memory, hlo, params, cache = compiled("h100", plan, rows, "decode", "xla_one_turn")
    assert not copied_weights(hlo, params) and not copied_weights(hlo, cache.stores)
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < DECODE_BYTES
    _, each_step, loops = executed(hlo)
    assert loops == [False]  # its steps
    scales = (4 + 3 * (PLANS[plan].num_layers - CONFIG.num_layers)) * (rows == "int8")
    assert sum(each_step.values()) <= most_operations("decode", plan) + scales, each_step


@pytest.mark.parametrize("program", ["run_any", "decode"])
@pytest.mark.parametrize("chip", CHIPS)
def test_rows_made_of_one_input_copy_no_weight(chip, program):
    """XLA would merge the products that read one array, which are few in the other plans."""
    mesh = mesh_of(CHIPS[chip])
    function, static, traced = programs(chip, EIGHT_UPPER, "bfloat16")[program]
    memory, hlo = text_of(function, static, on(mesh, traced), mesh)
    params, cache, *_ = traced
    assert not copied_weights(hlo, params) and not copied_weights(hlo, cache.stores)
    assert memory.temp_size_in_bytes < DECODE_BYTES * (program == "decode" or 2)


@pytest.mark.parametrize("program", ["prompt", "run_any"])
def test_a_prompt_chunk_with_xla_attention_on_an_h100_copies_no_weight(program):
    """With XLA's attention, blocks are a loop of known length over turns of `ONE_TURN_BYTES`: more operations
    than the kernel's, counted once in that loop, and more memory, which the pool leaves free. In the last
    layer each sequence has one query."""
    memory, hlo, params, cache = compiled("h100", "standard", "bfloat16", program, "xla_one_turn")
    assert not copied_weights(hlo, params) and not copied_weights(hlo, cache.stores)
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < 1.2 * ONE_TURN_BYTES
    once, repeated, loops = executed(hlo)
    assert loops == [True] * (CONFIG.num_layers - 1)
    assert sum((once + repeated).values()) <= GPU_OPERATIONS["run_any"]
    inside = [line for _, line, repeated in launched(hlo)[0] if repeated]
    made = [re.match(rf"(%\S+) = f32\[[\d,]*,{CONTEXT}\]", line) for line in inside]
    (scores,) = [found[1] for found in made if found]
    assert sum(f"{scores}," in line or f"{scores})" in line for line in inside) == 1  # that is read once
    # One sequence's pages are copied before the loop, which does not read the pool then.
    pool = ",".join(map(str, cache.stores["kv"][0].data.shape))
    (loop,) = [line for line in hlo.splitlines() if " while(" in line]
    assert (f"[{pool}]" in loop) == (program == "run_any")


@pytest.mark.parametrize(
    ("chip", "fill", "plan", "program"),
    [
        ("h100", "xla", THREE_UPPER, "run_any"),
        ("h100", "pallas_gpu", THREE_UPPER, "run_any"),
        ("h100", "pallas_gpu", THREE_UPPER, "prompt"),
        ("h100", "pallas_gpu", THREE_UPPER, "decode"),
        ("h100", "pallas_gpu", PLANS["swiftkv"], "run_any"),
        ("v5p", "xla", THREE_UPPER, "run_any"),
        ("v5p", "pallas_tpu", THREE_UPPER, "run_any"),
        ("v5p", "pallas_tpu", THREE_UPPER, "prompt"),
        ("v5p", "pallas_tpu", THREE_UPPER, "decode"),
        ("v5p", "pallas_tpu", PLANS["swiftkv"], "run_any"),
        ("v5p", "pallas_tpu", PLANS["swiftkv"], "decode"),
    ],
)
def test_a_fused_fill_copies_no_weight_and_has_no_loop(chip, fill, plan, program):
    """Rows of one stack, made at once; tokens that continue a page are written without a loop."""
    mesh = mesh_of(CHIPS[chip])
    function, static, traced = programs(chip, plan, "bfloat16", fill=fill)[program]
    memory, hlo = text_of(function, static, on(mesh, traced), mesh)
    params, cache, *_ = traced
    assert not copied_weights(hlo, params) and not copied_weights(hlo, cache.stores)
    assert memory.alias_size_in_bytes >= cache.nbytes
    fused = program != "decode" and fill != "xla"  # a decoded token is written by itself
    kernels = [line for line in hlo.splitlines() if " custom-call(" in line]
    assert any("fused_kv_fill" in line for line in kernels) == fused
    if fused:  # XLA makes the lower layer of all tokens, and of no upper row, also where pages go on
        assert multiplied(hlo) == LOWER_LAYER
    *_, loops = executed(hlo)
    assert loops.count(False) == (program == "decode")  # the loop over its steps


def in_place_of_cudnn(q, k, v, *, q_seqlen, kv_seqlen, return_residual, **_):
    """Reads the arrays that cuDNN's attention reads, and writes those that it writes."""
    q, k, v, *lengths = jax.lax.optimization_barrier((q, k, v, q_seqlen, kv_seqlen))
    some = (k[:, :1, :1] + v[:, :1, :1]) * sum(lengths)[:, None, None, None].astype(q.dtype)
    mixed = q + some
    sums = jnp.swapaxes(mixed[..., 0], 1, 2).astype(jnp.float32)
    return jax.lax.optimization_barrier((mixed, sums)) if return_residual else mixed


@pytest.mark.parametrize("program", ["prompt", "run_any"])
@pytest.mark.parametrize("rows", ["bfloat16", "int8"])
def test_around_cudnn_a_chunk_copies_no_weight_and_has_no_loop(monkeypatch, rows, program):
    """XLA needs a GPU to compile cuDNN's attention, so something else stands in its place. What cuDNN reads
    is dense, so each block of queries has a copy of its sequence's rows, in one layer at a time."""
    monkeypatch.setattr(cudnn, "dot_product_attention", in_place_of_cudnn)
    memory, hlo, params, cache = compiled("h100", "swiftkv", rows, program, "decode=pallas_gpu,chunk=cudnn")
    assert not copied_weights(hlo, params) and not copied_weights(hlo, cache.stores)
    assert memory.alias_size_in_bytes >= cache.nbytes
    dense = 2 * CONTEXT * CONFIG.num_kv_heads * CONFIG.head_dim * 2  # keys and values of a whole context
    blocks = 1 if program == "prompt" else block_count(TOKENS, LANES)  # of 32 queries, each with its copy
    assert blocks * dense < memory.temp_size_in_bytes < blocks * dense + 2 * DECODE_BYTES
    once, repeated, loops = executed(hlo)
    assert not loops and not repeated
    assert sum(once.values()) <= most_operations("run_any", "swiftkv"), once


# Gemma 3 4B's widths, tables and windows, with Gemma 2's soft caps, which XLA's attention computes.
GEMMA = dataclasses.replace(
    CONFIG,
    family="gemma3_text",
    hidden_size=2560,
    intermediate_size=10240,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    norm="rms_plus_one",
    norm_after=True,
    qk_norm=True,
    activation="gelu_tanh",
    tie_word_embeddings=True,
    embedding_scale=2560**0.5,
    attention_scale=256**-0.5,
    windows=(1024, FULL_ATTENTION),
    ropes=(RopeConfig(), RopeConfig(rope_type="linear", rope_theta=1e6, factor=8.0)),
)
CAPPED = dataclasses.replace(GEMMA, attention_softcap=50.0, logits_softcap=30.0)


# On v5p a chunk of 2048 tokens has an array of the size of its 2048 query columns, and cannot be told apart.
@pytest.mark.parametrize(("chip", "program"), [("v5p", "decode"), ("h100", "prompt"), ("h100", "decode")])
@pytest.mark.parametrize("config", [GEMMA, CAPPED], ids=["windows", "soft caps"])
def test_gemmas_programs_copy_no_weight_and_no_rows(chip, config, program):
    mesh, attention = mesh_of(CHIPS[chip]), "xla" if config.attention_softcap else None
    what = (chip, PLANS["standard"], "bfloat16")
    function, static, traced = programs(*what, config=config, attention=attention)[program]
    memory, hlo = text_of(function, static, on(mesh, traced), mesh)
    params, cache, *_ = traced
    assert not copied_weights(hlo, params) and not copied_weights(hlo, cache.stores)
    assert memory.alias_size_in_bytes >= cache.nbytes
    *_, loops = executed(hlo)
    assert loops.count(False) >= (program == "decode")  # the loop over its steps


# On v5p a chunk compiles for minutes.
@pytest.mark.parametrize(("chip", "program"), [("h100", "prompt"), ("h100", "decode"), ("v5p", "decode")])
def test_programs_of_latents_and_experts_copy_no_weight_and_no_rows(chip, program):
    """DeepSeek-V2-Lite's sizes: a dense layer, two with experts, whose sums of 16 MiB do not exist at once,
    and two that share a row. But for the pool, nothing made is as large as a kernel of all experts."""
    config = load_experiment("deepseek_v2_lite").architecture
    config = dataclasses.replace(config, num_layers=5, windows=(), mlps=config.mlps[:5])
    mesh, attention = mesh_of(CHIPS[chip]), "xla_one_turn" if chip == "h100" else None
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # rows are wider on a TPU
        made = programs(chip, config.plan(3, 2), "bfloat16", config=config, attention=attention)
    function, static, traced = made[program]
    memory, hlo = text_of(function, static, on(mesh, traced), mesh)
    params, cache, *_ = traced
    (pool,) = [store.data.shape for store in cache.stores["latent"]]
    assert pool[-1] == (640 if chip == "v5p" else 576) and memory.alias_size_in_bytes >= cache.nbytes
    least = math.prod(params["layers"][1]["mlp"]["experts"]["up_proj"]["kernel"].shape)
    for _, line, _ in launched(hlo)[0]:
        written = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", result_of(line))]
        assert all(math.prod(dims) < least or dims == pool for dims in written), line
    copies = [line for line in copied_weights(hlo, params) if line.startswith(("%", "ROOT"))]
    if (chip, program) == ("h100", "prompt"):  # `kv_b_proj`, 4 MiB, where latents are expanded
        copies = [line for line in copies if "bf16[512,16,256]" not in line]
    assert not copies and not copied_weights(hlo, cache.stores)
    most = {"h100 decode": ONE_TURN_BYTES, "h100 prompt": 1.25 * ONE_TURN_BYTES, "v5p decode": DECODE_BYTES}
    assert memory.temp_size_in_bytes < most[f"{chip} {program}"]
    assert executed(hlo)[2].count(False) == (program == "decode")  # its steps


SHARED = {  # what is served by four chips: plan, rows, and whether a kernel fills
    **{plan: (PLANS[plan], "bfloat16", False) for plan in PLANS},
    "int8": (PLANS["swiftkv"], "int8", False),
    "acrosskv int8": (PLANS["acrosskv"], "int8", False),
    "fill": (THREE_UPPER, "bfloat16", True),
    "fill int8": (THREE_UPPER, "int8", True),
}
# Smaller chips have less VMEM than v5p, so other block sizes, and the same programs around the kernels.
ON_FOUR = [*itertools.product(("v5p", "h100"), SHARED)]
ON_FOUR += [("v4", "swiftkv"), ("v4", "fill int8"), ("v5e", "swiftkv"), ("v6e", "swiftkv")]


def shared(chip: str, what: str, program: str):
    """As `compiled_for_four`, and the plan."""
    plan, rows, fills = SHARED[what]
    return *compiled_for_four(chip, plan, rows, FILLS[chip] if fills else None, program), plan


def check_said(operations: collections.Counter, hlo: str, plan: KVPlan) -> None:
    """Each layer sums what its attention and its MLP give; the rest is for the embedding and sampling. What a
    chip does with its own heads (attention, writing, the fill) says nothing."""
    said = {name: n for name, n in operations.items() if name.startswith(COLLECTIVES)}
    assert 2 * plan.num_layers <= sum(said.values()) <= 2 * plan.num_layers + 8, said
    named = re.compile(rf"^.* (?:{'|'.join(COLLECTIVES)})(?:-start)?\(.*$", re.M)
    lines = named.findall(hlo)
    assert lines and all("op_name=" in line for line in lines)
    assert not [line for line in lines if "shard_map" in line]


@pytest.mark.parametrize(("chip", "what"), ON_FOUR)
def test_tensor_parallel_chips_communicate_twice_a_layer(chip, what):
    memory, hlo, cache, plan = shared(chip, what, "decode")
    assert cache.bytes_on_each == cache.nbytes / 4 <= memory.alias_size_in_bytes
    assert memory.temp_size_in_bytes < DECODE_BYTES
    _, each_step, loops = executed(hlo)
    assert loops == [False]  # its steps: attention is no loop, so nothing is said inside it
    check_said(each_step, hlo, plan)


@pytest.mark.parametrize(("chip", "what"), [one for one in ON_FOUR if one[1] != "acrosskv int8"])
def test_tensor_parallel_chips_gather_scores_and_not_the_output_head(chip, what):
    memory, hlo, cache, plan = shared(chip, what, "run_any")
    assert cache.bytes_on_each == cache.nbytes / 4 <= memory.alias_size_in_bytes
    padded = 2 if "fill" in what else 1  # the stream of pages that begin, as many as there may be
    assert memory.temp_size_in_bytes < padded * DECODE_BYTES
    once, each_step, loops = executed(hlo)
    assert not loops and not each_step
    check_said(once, hlo, plan)


ARCHITECTURES = Path(__file__).parents[2] / "configs/architectures"
FITS = {  # chip -> (model, what JAX may have of its memory at the default fraction, sequences of 8192 tokens)
    "v4": ("llama8b", 0.9 * 32 * 2**30, 12),
    "h100": ("mistral_small", 0.9 * 79.6 * 2**30, 16),
}


@pytest.mark.parametrize("chip", FITS)
def test_a_published_model_and_its_rows_fit_on_one_chip(chip):
    """Weights and rows of all layers by arithmetic, beside what the largest program takes: that does not grow
    with layers."""
    name, memory, sequences = FITS[chip]
    config = ModelConfig.from_hf(ARCHITECTURES / f"{name}.json")
    settings = Settings(max_model_len=8192, kernels=NAMED[chip])
    working = [needs(chip, dataclasses.replace(config, num_layers=n, windows=()), settings) for n in (2, 4)]
    assert working[1] <= 1.1 * working[0]
    plan = KVPlan.swiftkv(config.num_layers, config.num_layers // 2)
    held = size(weights.abstract(config, plan, "bfloat16", cuts=None))
    model, pages = Transformer(config, plan, "bfloat16"), sequences * settings.pages_per_sequence
    pool = jax.eval_shape(
        functools.partial(empty_pool, model, dataclasses.replace(settings, num_pages=pages))
    )
    assert held + pool.nbytes + working[1] <= memory, (held, pool.nbytes, working)


def needs(chip: str, config: ModelConfig, settings: Settings) -> int:
    """Bytes that the largest program takes on one chip."""
    mesh = mesh_of(TPUS.get(chip, HOPPER))
    model = Transformer(config, KVPlan.swiftkv(config.num_layers, config.num_layers // 2), "bfloat16")
    params = on(mesh, weights.abstract(config, model.plan, "bfloat16", cuts=None))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return working_bytes(model, params, None, dataclasses.replace(settings, num_pages=256))


@pytest.mark.parametrize(
    "dtype, letters", [("float8_e4m3fn", "f8e4m3fn"), ("bfloat16", "bf16"), ("int8", "s8")]
)
@pytest.mark.parametrize("chip", CHIPS)
def test_rows_that_are_scored_are_rounded_on_a_chip(chip, dtype, letters):
    """XLA's GPU compiler leaves out a conversion to a narrower float and back, where it sees both."""
    place = NamedSharding(mesh_of(CHIPS[chip]), PartitionSpec())
    row = jax.ShapeDtypeStruct((64, 8, 128), jnp.float32, sharding=place)
    program = jax.jit(lambda x: rounded((2 * x,), dtype)[0] + 1).lower(row).compile()
    assert f"{letters}[" in program.as_text()
