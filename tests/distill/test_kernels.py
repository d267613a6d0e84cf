"""Which attention a run trains by: what is named stays, and where nothing is, the check decides."""

import dataclasses

import pytest

from swiftkv_jax import processes
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.distill import kernels
from swiftkv_jax.distill.config import AttentionConfig, DataConfig, Experiment, LossConfig, MeshConfig
from swiftkv_jax.distill.kernels import choose
from swiftkv_jax.kernels.check.decide import Decision
from swiftkv_jax.kernels.check.machine import CPU, Machine

GPU, TPU = Machine("gpu", "a GPU", "1"), Machine("tpu", "a TPU")
MODEL = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    windows=(1 << 30, 128),
)
RUN = Experiment(
    name="run",
    data=DataConfig(sources=("text",), seq_len=512, batch_size=4),
    architecture=MODEL,
    tokenizer="t",
    trainable="all",
    loss=LossConfig(kl_weight=0.0, lm_weight=1.0),
    steps=1,
)


@pytest.fixture
def asked(monkeypatch) -> list:
    """What is decided about; the fastest is the last candidate."""
    found = []

    def decide(calls, machine, folder, **more):
        found.append((*calls, machine, more))
        return Decision({"train": more["candidates"]["train"][-1]}, "checked on a chip")

    monkeypatch.setattr(kernels, "decide", decide)
    monkeypatch.setattr(kernels.machines, "taken", lambda: False)
    return found


@pytest.mark.parametrize(("machine", "name"), [(GPU, "cudnn"), (TPU, "splash")])
def test_what_the_check_found_trains(machine, name, asked):
    attention, how = choose(RUN, machine)
    assert attention.on(machine.platform) == name and how == "checked on a chip"
    ((call, *_),) = asked
    assert (call.kind, call.operation, call.tokens, call.heads) == ("train", "causal_attention", 512, 8)
    assert call.windows == (None, 128)
    cut = dataclasses.replace(RUN, mesh=MeshConfig(tensor=2, context=2))
    assert choose(cut, machine)[0].on(machine.platform) == {"cudnn": "xla"}.get(name, name)
    assert (asked[1][0].heads, asked[1][0].kv_heads) == (4, 2)


def test_a_name_stays_and_a_cpu_checks_nothing(asked):
    named = dataclasses.replace(RUN, attention=AttentionConfig(tpu="splash"))
    assert choose(named, TPU) == (named.attention, "named")
    assert choose(RUN, CPU) == (RUN.attention, "the choice of this platform")
    assert not asked


def test_a_tpu_that_this_process_has_is_not_checked(asked, monkeypatch):
    monkeypatch.setattr(kernels.machines, "taken", lambda: True)
    choose(RUN, TPU)
    choose(RUN, GPU)
    assert [more["check"] for *_, more in asked] == [False, True]


def test_a_model_that_cannot_be_read_is_another_s_to_refuse(asked):
    missing = dataclasses.replace(RUN, architecture=None, model="/nowhere")
    assert choose(missing, GPU)[0].gpu == "xla" and not asked


def test_process_0_decides_for_all(asked, monkeypatch):
    monkeypatch.setattr(processes, "text_from_first", lambda *_: '["cudnn", "checked on a chip"]')
    assert choose(RUN, GPU)[0].gpu == "cudnn" and not asked
