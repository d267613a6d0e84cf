"""Which attention a run trains by: what is named stays, and where nothing is, the check decides."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import pytest
from tiny_models import sized

from swiftkv_jax.cli import convert, distil
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.distill import compile_only, kernels
from swiftkv_jax.distill.config import (
    DataConfig,
    Experiment,
    LossConfig,
    MeshConfig,
    PredictConfig,
    PredictionLossConfig,
)
from swiftkv_jax.distill.kernels import choose
from swiftkv_jax.kernels.check.decide import Decision
from swiftkv_jax.kernels.check.machine import CPU, Machine
from swiftkv_jax.kernels.common.dispatch import UnsupportedError

GPU, TPU = Machine("gpu", "a GPU", "1"), Machine("tpu", "a TPU")
MODEL = sized(300, 64, 64, 2, 8, 4, 8, windows=(1 << 30, 128))
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
    """The arguments of each decision; the last candidate is always chosen."""
    found = []

    def decide(calls, machine, folder, **more):
        found.append((*calls, machine, more))
        return Decision({"train": more["candidates"]["train"][-1]}, "checked on a chip")

    monkeypatch.setattr(kernels, "decide", decide)
    monkeypatch.setattr(kernels.machines, "taken", lambda: False)
    return found


@pytest.mark.parametrize(("machine", "name"), [(GPU, "cudnn"), (TPU, "splash")])
def test_training_uses_the_attention_that_the_check_chose(machine, name, asked):
    attention, how = choose(RUN, machine)
    assert attention == name and how == "checked on a chip"
    ((call, *_),) = asked
    assert (call.kind, call.operation, call.tokens, call.heads) == ("train", "causal_attention", 512, 8)
    assert call.windows == (None, 128)
    cut = dataclasses.replace(RUN, mesh=MeshConfig(tensor=2, context=2))
    assert choose(cut, machine)[0] == {"cudnn": "xla"}.get(name, name)
    assert (asked[1][0].heads, asked[1][0].kv_heads) == (4, 2)


def test_the_check_is_of_a_shorter_row_where_no_window_cuts_it(asked):
    """XLA's attention of 131072 tokens takes longer than a check may, and so no kernel would be chosen."""
    plain = dataclasses.replace(MODEL, windows=())
    for model, tokens in ((plain, 16_384), (MODEL, 131_072)):
        data = dataclasses.replace(RUN.data, seq_len=131_072)
        choose(dataclasses.replace(RUN, architecture=model, data=data), TPU)
        assert asked[-1][0].tokens == tokens


def test_compile_only_assumes_the_kernel_that_is_expected_to_win(monkeypatch):
    """The next one where the step has a call that it does not support; a named one is never replaced."""
    asked = []

    def compile_step(experiment, devices):
        asked.append(experiment.attention)
        if asked[-1] in ("splash", "cudnn") and len(asked) > 1:
            raise UnsupportedError(f"{asked[-1]} does not support heads of width 8")
        return "compiled"

    monkeypatch.setattr(compile_only, "compile_step", compile_step)
    for platform, name in (("tpu", "splash"), ("gpu", "cudnn")):
        run, devices = partial(compile_only.with_attention, RUN), [SimpleNamespace(platform=platform)]
        assert run(devices) == (f"{name} (assumed; the check on the device decides)", "compiled")
        assert run(devices) == ("xla (assumed; the check on the device decides)", "compiled")
        named = dataclasses.replace(RUN, attention=name)
        with pytest.raises(UsageError, match=f"{name} does not support .*; choose another by attention"):
            compile_only.with_attention(named, devices)
        assert asked == [name, name, "xla", name]
        asked.clear()


def test_a_named_kernel_is_kept_and_a_cpu_checks_nothing(asked):
    named = dataclasses.replace(RUN, attention="splash")
    assert choose(named, TPU) == ("splash", "named")
    assert choose(RUN, CPU) == (None, "the choice of this platform")
    assert not asked


def test_a_kv_predictor_trains_by_what_is_best_for_both_of_its_models(asked, monkeypatch):
    small = dataclasses.replace(MODEL, num_heads=4, num_kv_heads=2)
    given = PredictConfig(auxiliary="small", architecture=small)
    parts = {"trainable": "predictor", "predict": given, "loss": PredictionLossConfig()}
    run = dataclasses.replace(RUN, model="base", tokenizer="", **parts)
    assert choose(run, GPU) == ("cudnn", "checked on a chip")
    assert [call.heads for call, *_ in asked] == [8, 4]
    choose(dataclasses.replace(run, predict=PredictConfig(keep=(0,))), GPU)
    assert len(asked) == 3, "layers of the base have its heads"

    def decide(calls, *_, **__):
        return Decision({"train": "xla" if calls[0].heads == 4 else "cudnn"}, "checked on a chip")

    monkeypatch.setattr(kernels, "decide", decide)
    assert choose(run, GPU) == ("xla", "the safe one")


def test_commands_choose_before_jax_has_its_devices(monkeypatch, tmp_path, capsys):
    """A TPU has one owner: whoever asks JAX how many devices there are leaves none to check on."""
    order = []

    def choose(experiment):
        order.append(("choose", experiment.data.seq_len))
        return None, "checked on a chip"

    def count():
        order.append("devices")
        raise UsageError("seen enough")

    monkeypatch.setattr(kernels, "choose", choose)
    monkeypatch.setattr(jax, "device_count", count)
    data = ["--data", str(DEMO / "corpus.jsonl.xz"), "--length", "64"]
    assert distil.main([str(DEMO / "teacher"), *data, "--out", str(tmp_path / "run")]) == 2
    words = ["--split", "4", "--length", "32", "--out", str(tmp_path / "out")]
    assert convert.main([str(DEMO / "teacher"), *words]) == 2
    assert order == [("choose", 64), "devices", ("choose", 32), "devices"]
    assert capsys.readouterr().err.count("seen enough") == 2
