"""While programs are being compiled, requests run by those that are there, with the same tokens."""

import dataclasses
import functools
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor, wait

import jax
import pytest
import tiny_engine as tiny

from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core.predict import Predicted, uniform
from swiftkv_jax.engine import runner, score, warm
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.server.settings import HttpSettings

KINDS = (
    dataclasses.replace(tiny.GREEDY, max_tokens=6),
    SamplingParams(max_tokens=5, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=5, seed=1, top_p=0.9, repetition_penalty=1.2, logprobs=2, ignore_eos=True),
)
PROMPTS = ("a", "hello there, all of you", "two words", "x" * 40)


def make(kind: str) -> LLM:
    model, params = tiny.make_model(KVPlan.swiftkv(2, 1), num_layers=2)
    if kind == "auxiliary":
        pair = Predicted(model, model, Prediction.nearest(2, (0, 1)))
        params = {"base": params, "auxiliary": params, "predictor": uniform(pair, jax.random.key(0))}
        model = pair
    return LLM.from_model(model, params, tiny.Bytes(), **tiny.SIZES)


def answers(llm: LLM) -> list[list[int]]:
    """Answers to prompts of all kinds together; newly compiled programs are taken before each step."""
    requests = [llm.request(p, kind) for p in PROMPTS for kind in KINDS]
    llm.engine.add(*requests)
    found = {}
    while llm.engine.busy:
        llm.engine.take_compiled()
        for group in llm.engine.step():
            if group.finished:
                found[group.request.request_id] = group.output().outputs[0].token_ids
    return [found[request.request_id] for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", pytest.param("auxiliary", marks=pytest.mark.slow)])
def test_requests_run_by_the_first_programs_until_the_others_are_compiled(kind, monkeypatch):
    """The compiler is held up behind the first programs, and let go while requests are under way."""
    held, compile_one = threading.Event(), warm._compile
    first = 4 if kind == "auxiliary" else 3
    numbers = iter(range(1000))

    def slow(call) -> None:
        if next(numbers) >= first:
            held.wait()
        compile_one(call)

    monkeypatch.setattr(warm, "_compile", slow)
    llm = make(kind)
    used: list[tuple] = []
    is_ready = runner.Runner._is_ready
    monkeypatch.setattr(
        runner.Runner, "_is_ready", lambda self, *key: is_ready(self, *key) and not used.append(key)
    )
    jax.clear_caches()  # of earlier tests
    with tiny.compilations() as compiled:
        assert llm.fingerprint
        llm.engine.begin_warm_up()
        count, total = llm.engine.warming
        before = len(compiled)
        assert count == first < total
        few = answers(llm)
        assert llm.engine.warming == (first, total) and len(compiled) == before
        assert {key[1] for key in used} == {4} and all(32 in key or runner.MODES[-1] in key for key in used)
        held.set()
        some = answers(llm)  # the number in use grows meanwhile
        while llm.engine.warming:
            llm.engine.take_compiled()
            time.sleep(0.01)
        before, used[:] = len(compiled), []
        all_of_them = answers(llm)
        assert len(compiled) == before
    assert few == some == all_of_them


def test_a_server_compiles_at_most_24_programs_and_greedy_decoding_among_the_first():
    """The defaults are 16 lanes, 2048 tokens per step, and scored prompts of up to 4096 tokens."""
    model, params = tiny.make_model(KVPlan.swiftkv(2, 1), num_layers=2, max_position_embeddings=8192)
    llm = LLM.from_model(model, params, tiny.Bytes(), max_model_len=8192, num_pages=128)
    keys = [program.key for program in llm.engine.runner.programs()]
    scored = score.lengths(HttpSettings.max_scored_tokens, llm.settings.max_model_len)
    assert len(keys) + len(scored) <= 24 and max(scored) == HttpSettings.max_scored_tokens
    plain, fullest = runner.MODES[0], runner.MODES[-1]
    assert keys[:3] == [("step", 16, 2048), ("draw", 16, fullest), ("loop", 16, fullest)]
    assert keys[3:5] == [("loop", 1, plain), ("loop", 16, plain)]


@pytest.mark.slow
def test_an_accelerator_reads_one_prompt_in_programs_of_one_row(monkeypatch):
    """Chunks of every size, and in every sampling mode; after the warm-up nothing compiles."""
    monkeypatch.setattr(dispatch, "device", lambda: ("gpu", "some GPU", 132))
    llm, launched = make("plain"), []
    step_for = runner.Runner._step_for
    monkeypatch.setattr(
        runner.Runner, "_step_for", lambda *of: launched.append(step_for(*of)[:2]) or step_for(*of)
    )
    jax.clear_caches()  # of earlier tests
    with tiny.compilations() as compiled:
        assert llm.fingerprint
        llm.engine.warm_up()
        before = len(compiled)
        for letter, kind in zip("xyz", KINDS, strict=True):
            launched.clear()
            llm.engine.add(llm.request(letter * 40, kind))  # a whole step, and the rest
            while llm.engine.busy:
                llm.engine.step()
            assert launched[:2] == [(1, 32), (1, 8)]
        answers(llm)
        assert len(compiled) == before


class AtOnce(ThreadPoolExecutor):
    """An executor that has run each call when `submit` returns."""

    def submit(self, *work):
        future = super().submit(*work)
        wait([future])
        return future


@pytest.mark.parametrize("fails", (("step", 1, 1), "the first"))
def test_a_warm_up_ends_where_all_is_compiled_before_the_first_look(fails, monkeypatch):
    """This happens if everything is in the compilation cache; `begin_warm_up` then takes all into use.

    A program that cannot be compiled is done without if the others can do its work.
    """
    llm, compile_one, keys = make("plain"), warm._compile, []
    programs = [program.key for program in llm.engine.runner.programs()]

    def compiled(call) -> None:
        keys.append(programs[len(keys)])
        if keys[-1] == fails or fails == "the first":
            raise ValueError
        compile_one(call)

    monkeypatch.setattr(warm, "_compile", compiled)
    monkeypatch.setattr(warm, "ThreadPoolExecutor", AtOnce)
    if fails == "the first":
        with pytest.raises(ValueError):
            llm.engine.begin_warm_up()
        return
    llm.engine.begin_warm_up()
    llm.engine.take_compiled()
    assert keys == programs and llm.engine.warming is None and llm.fingerprint
    with tiny.compilations() as found:
        assert answers(llm)
    assert found == []


class Fakes:
    """Programs that compile when they are let go, and write down when they are launched."""

    def __init__(self, monkeypatch, broken: str = ""):
        self.gates, self.sent = {name: threading.Event() for name in "ABC"}, []

        def send(name: str) -> None:
            self.sent.append(name)
            if name == broken:
                raise jax.errors.JaxRuntimeError("out of memory")

        monkeypatch.setattr(warm, "_compile", lambda call: self.gates[call.args[0]].wait())
        monkeypatch.setattr(warm, "os", types.SimpleNamespace(cpu_count=lambda: 3))
        self.programs = [
            warm.Program((name,), functools.partial(str, name), functools.partial(send, name))
            for name in "ABC"
        ]


@pytest.mark.parametrize("in_order", [False, True])
def test_several_processes_launch_new_programs_in_one_order(in_order, monkeypatch):
    """What a launch computes together with others would wait for a program that they launch later."""
    fakes = Fakes(monkeypatch)
    warming = warm.WarmUp(fakes.programs, {("A",)}, in_order)
    fakes.gates["C"].set()
    wait([future for one, future in warming._left if one.key == ("C",)])
    assert warming.waits != in_order
    for name in "BA":
        fakes.gates[name].set()
    while not warming.done:
        warming.take()
    assert sorted(fakes.sent) == ["A", "B", "C"] and (fakes.sent == ["A", "B", "C"] or not in_order)


def test_with_several_processes_no_program_is_left_out(monkeypatch):
    fakes = Fakes(monkeypatch)
    monkeypatch.setattr(warm, "_compile", lambda call: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        warm.WarmUp(fakes.programs, set(), in_order=True).take()


def test_a_program_that_cannot_be_launched_is_launched_again_only_if_it_is_needed(monkeypatch):
    fakes = Fakes(monkeypatch, broken="B")
    for gate in fakes.gates.values():
        gate.set()
    warming = warm.WarmUp(fakes.programs, {("A",)})
    wait([future for _, future in warming._left])
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        warming.take()
    while not warming.done:
        warming.take()
    assert fakes.sent == ["A", "B", "C"]
    assert warming.failed == {("B",)} and warming.ready == {("A",), ("C",)} and warming.usable
