"""`Settings.kernels`: what is named, what a check found, or the safe ones; and what an LLM says of it."""

import dataclasses
import json
import shutil
import types

import jax
import pytest
import tiny_engine as tiny

from swiftkv_jax.common import processes
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.rope import NONE, RopeConfig
from swiftkv_jax.engine import kernels
from swiftkv_jax.engine.kernels import calls_of, choose, in_force
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.runner import Runner
from swiftkv_jax.engine.settings import Settings, named
from swiftkv_jax.kernels.check.calls import OPERATIONS, known, verdict
from swiftkv_jax.kernels.check.decide import Decision
from swiftkv_jax.kernels.check.machine import Machine
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.dispatch import ByKind, Implementation
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION

FREE = {"num_kv_heads": 4, "rope": RopeConfig(rope_type=NONE)}  # of rotary embedding, and multi-head
GPU = Machine("gpu", "a GPU", "1")
TPU = Machine("tpu", "a TPU")


NATIVE = dict.fromkeys(("decode", "chunk", "write"), "native_cpu")
CUDNN = dict.fromkeys(("chunk", "decode", "scoring"), "cudnn")


@pytest.mark.parametrize(
    ("text", "want", "own"),
    [
        ("pallas_gpu", dict.fromkeys(("decode", "chunk", "fill"), "pallas_gpu"), set()),
        ("decode=xla", {"decode": "xla"}, {"decode"}),
        ("write=pallas_tpu", {"write": "pallas_tpu"}, {"write"}),
        ("attention=xla", {"decode": "xla", "chunk": "xla"}, {"decode", "chunk"}),
        ("cudnn, decode = xla", {"decode": "xla", "chunk": "cudnn", "scoring": "cudnn"}, {"decode"}),
        ("cudnn,fill=unfused", CUDNN | {"fill": "unfused"}, {"fill"}),
        ("native_cpu,scoring=xla", NATIVE | {"scoring": "xla"}, {"scoring"}),
    ],
)
def test_a_kernel_name_applies_to_all_operations_that_have_it_or_to_one(text, want, own):
    assert named(text) == (want, own)


@pytest.mark.parametrize(
    "text", ["palas_gpu", "", "decod=xla", "fill=cudnn", "chunk=", "prefill=xla", "report", 3]
)
def test_a_wrong_name_is_refused(text):
    with pytest.raises(UsageError):
        Settings(max_model_len=8, kernels=text)


@pytest.mark.parametrize("form, width", [("k", 80), ("v", 80), ("x", 48)])
def test_rows_of_one_array_are_checked_and_reported_by_their_own_operation(form, width):
    """An LLM reports the implementation of that operation: C++ on a CPU with a compiler."""
    net, _ = tiny.make_model(tiny.PLANS["standard"])
    config = dataclasses.replace(net.config, **({"num_kv_heads": 4} if form == "k" else FREE))
    plan, settings = tiny.PLANS["standard"].stored_as(form), Settings(max_model_len=64)
    decode, chunk, write = calls_of(config, plan, "float32", settings)
    operation = "k_cache_attention" if form == "k" else "x_cache_attention"
    assert [call.operation for call in (decode, chunk, write)] == [operation] * 2 + ["page_write"]
    assert (write.kv_heads, write.width) == (1, width)  # one scale a token
    if form == "k":
        assert known(decode, ("xla_one_turn", "xla", "cudnn")) == ("xla_one_turn", "xla")
        whole = calls_of(config, plan, "float32", settings, shards=2)
        assert whole == [decode, chunk, write], "every device has them all"
    else:
        assert (decode.row, decode.rope) == (width, False)
        assert known(decode, ("xla_one_turn", "cudnn", "pallas_gpu")) == ("xla_one_turn", "pallas_gpu")
    told = in_force(config, plan, "float32", settings)
    here = "xla" if shutil.which("c++") is None and shutil.which("g++") is None else "native_cpu"
    assert (told["decode"], told["chunk"]) == (here, here)
    chosen = choose(config, plan, "float32", dataclasses.replace(settings, kernels="xla"), machine=GPU)
    assert chosen.settings.kernels == "decode=xla_one_turn,chunk=xla_one_turn"


@pytest.fixture
def model():
    return tiny.make_model(tiny.PLANS["acrosskv"])


@pytest.fixture
def asked(monkeypatch) -> list:
    """The arguments of each decision, which always has the same outcome."""
    calls = []

    def decide(*args, **more):
        calls.append((*args, more))
        return Decision({"decode": "xla", "chunk": "xla_one_turn", "fill": "xla"}, "checked on a GPU")

    monkeypatch.setattr(kernels, "decide", decide)
    monkeypatch.setattr(kernels.machines, "taken", lambda: False)
    return calls


@pytest.mark.slow
def test_kernels_chosen_by_the_check_run_and_give_the_same_tokens(model, asked, monkeypatch):
    monkeypatch.setattr(kernels, "this_machine", lambda: GPU)
    llm = LLM.from_model(*model, **tiny.SIZES)
    (calls, machine, _, _) = asked[0]
    assert [call.kind for call in calls] == ["decode", "chunk", "fill"] and machine == GPU
    write = {"write": llm.kernels["write"]}
    assert (
        write["write"] in ("native_cpu", "xla") and "write" not in llm.settings.kernels
    )  # nothing to choose from
    chosen = {"decode": "xla", "chunk": "xla_one_turn", "fill": "xla", "how": "checked on a GPU"}
    assert llm.kernels == chosen | write
    prompts = tiny.prompts((5, 33))
    want = [tiny.greedy(*model, prompt, 5) for prompt in prompts]
    params = dataclasses.replace(tiny.GREEDY, max_tokens=5)
    assert tiny.tokens(llm.generate(prompts, params, use_tqdm=False)) == want
    assert len(asked) == 1
    safe = {"decode": "xla_one_turn", "chunk": "xla_one_turn", "fill": "unfused", "how": "the safe ones"}
    assert llm.replace(kernels="xla").kernels == safe | write


def test_named_kernels_are_kept(model, asked, monkeypatch):
    """A name for all leaves out a fill that has no row."""
    monkeypatch.setattr(kernels, "this_machine", lambda: GPU)
    llm = LLM.from_model(*model, **tiny.SIZES, kernels="decode=reference")
    assert llm.settings.kernels == "decode=reference,chunk=xla_one_turn,fill=xla"
    named = LLM.from_model(*model, **tiny.SIZES, kernels="reference,chunk=xla,fill=xla")
    wanted = {"decode": "reference", "chunk": "xla", "fill": "xla", "scoring": "reference"}
    assert named.settings.implementations == wanted
    assert named.kernels["how"] == "named" and len(asked) == 1
    plain = LLM.from_model(*tiny.make_model(tiny.PLANS["standard"]), **tiny.SIZES, kernels="reference")
    assert "fill" not in plain.settings.kernels and plain.kernels["decode"] == "reference"


def test_no_kernel_is_checked_on_a_cpu(model, asked):
    llm = LLM.from_model(*model, **tiny.SIZES)
    assert not asked and llm.settings.kernels == "auto"
    assert llm.kernels["decode"] in ("native_cpu", "xla") and llm.kernels["how"] == "this platform's"
    safe = LLM.from_model(*model, **tiny.SIZES, kernels="xla")
    assert (safe.kernels["decode"], safe.kernels["chunk"], safe.kernels["fill"]) == ("xla", "xla", "unfused")


def test_kernels_are_not_checked_if_this_process_holds_the_tpu(model, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels.machines, "taken", lambda: True)
    net, settings = model[0], Settings(max_model_len=64)
    chosen = choose(net.config, net.plan, net.dtype, settings, machine=TPU, folder=tmp_path / "kept").settings
    assert chosen.kernels == "decode=xla_one_turn,chunk=xla_one_turn,write=xla"


@pytest.mark.parametrize(
    ("machine", "given", "page"),
    [
        (TPU, {"cache_dtype": "int8"}, 128),
        (TPU, {"cache_dtype": "int8", "page_size": 32}, 32),
        (GPU, {"cache_dtype": "int8"}, 64),
    ],
)
def test_a_page_has_128_tokens_for_8_bit_rows_on_a_tpu(model, monkeypatch, machine, given, page):
    monkeypatch.setattr(kernels, "this_machine", lambda: machine)
    sizes = {name: size for name, size in tiny.SIZES.items() if name != "page_size"}
    llm = LLM.from_model(*model, **sizes, kernels="xla", **given)
    assert llm.settings.page_size == llm.replace(max_num_seqs=1).settings.page_size == page


def test_calls_are_those_of_the_engine():
    shape = {"num_heads": 8, "num_kv_heads": 2, "windows": (2**30, 9, 2**30, 9), "qk_norm": True}
    net, _ = tiny.make_model(tiny.PLANS["acrosskv"], **shape)
    sizes = {"max_model_len": 60, "page_size": 8, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    settings = Settings(**sizes, cache_dtype="int8")
    decode, chunk, fill, write = calls_of(net.config, net.plan, net.dtype, settings)
    assert (decode.heads, decode.kv_heads, decode.width, decode.stored) == (8, 2, 20, "int8")
    assert (decode.capacity, decode.lanes, decode.page, decode.windows) == (64, 3, 8, (None, 9))
    assert chunk == dataclasses.replace(decode, kind="chunk") and chunk.block == 64 and chunk.tokens == 64
    assert (fill.rows, fill.dim, fill.bias, fill.k_norm) == (2, 48, True, True)
    assert write == dataclasses.replace(decode, kind="write", operation="page_write")
    half = calls_of(net.config, net.plan, net.dtype, settings, shards=2)
    assert {(call.heads, call.kv_heads) for call in half} == {(4, 1)}


@pytest.mark.parametrize(("lanes", "fixed", "forms"), [(3, False, 2), (8, False, 1), (3, True, 1)])
def test_chunks_are_timed_in_the_forms_that_an_accelerator_launches(lanes, fixed, forms, monkeypatch):
    """A prompt's in a program of one row, pieces of many in that of all lanes, where blocks are a chunk's."""
    seen: set[tuple] = set()

    def noted(q, k, v, table, sequence, position, **options):
        if q.shape[1] > ByKind.FEW:
            seen.add((q.shape, table.shape, sequence.shape, position.shape))
        return q

    name = f"noted{lanes}{fixed}"  # another one each time, so that nothing is traced already
    monkeypatch.setitem(PAGED_ATTENTION, name, Implementation(noted))
    monkeypatch.setattr(dispatch, "device", lambda: ("gpu", "some GPU", 132))
    sizes = {"max_model_len": 256, "page_size": 8, "max_num_seqs": lanes, "max_num_batched_tokens": 128}
    settings = Settings(**sizes, num_pages=64, kernels=f"attention={name}", batch_invariant=fixed)
    net, params = tiny.make_model(tiny.PLANS["standard"], max_position_embeddings=256)
    runner = Runner(net, params, None, settings, lambda params, make: make())
    for program in runner.programs():
        if program.key[0] == "step" and program.key[2] == 128:
            program.call.func.eval_shape(*program.call.args, **program.call.keywords)
    launched, seen = seen, set()
    _, chunk, _ = calls_of(net.config, net.plan, net.dtype, settings)
    for _, case in OPERATIONS[chunk.operation].case.sizes(chunk):
        jax.eval_shape(case.timed(name))
    assert seen == launched and len(seen) == forms


def test_a_check_of_latents_is_also_of_what_long_chunks_expand():
    net, _ = tiny.model("deepseek")
    latent, heads = net.config.latent, net.config.num_heads
    _, chunk, *_ = calls_of(net.config, net.plan, net.dtype, Settings(max_model_len=512))
    read, *_, long = (case for _, case in OPERATIONS[chunk.operation].case.checked(chunk))
    assert (read.kv_heads, read.width, read.shared) == (1, latent.rank + latent.rotary, latent.rank)
    q, k, v, *_ = long.shapes()[0]
    assert q.shape[1] == 256 and q.shape[3] == latent.plain + latent.rotary
    assert (k.shape[-1], v.shape[-1]) == (heads * q.shape[3], heads * latent.value)
    assert verdict([("", long)], "xla_one_turn")["right"]


class Store:
    """JAX's key-value store of a distributed run."""

    def __init__(self):
        self.values: dict[str, str] = {}

    def key_value_set(self, key, value, allow_overwrite):
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        return self.values[key]


def test_process_0_decides_for_all(model, asked, monkeypatch):
    from jax._src import distributed

    store, net, found = Store(), model[0], []
    monkeypatch.setattr(processes.jax.distributed, "is_initialized", lambda: True)
    for process in (0, 1):
        state = types.SimpleNamespace(client=store, process_id=process)
        monkeypatch.setattr(distributed, "global_state", state)
        chosen = choose(net.config, net.plan, net.dtype, Settings(max_model_len=64), machine=GPU)
        found.append(chosen.settings)
    assert found[0] == found[1] and found[0].implementations["fill"] == "xla" and len(asked) == 1
    assert json.loads(*store.values.values())[1] == "checked on a GPU"
