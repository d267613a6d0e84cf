"""Runs of train.py as a user starts them: killed, resumed, interrupted, misled; each against the undisturbed
run."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from processes_made import LOST, finish, start, virtual_devices
from tiny_models import sized

from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.cli.train import main
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
STEPS = 40

CONFIG = """
from swiftkv_jax.distill.config import Experiment, LossConfig, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig

config = Experiment(
    name="small", model={model!r}, tokenizer={tokenizer!r},
    plan=PlanConfig(split=2, share=2, init="least_squares", init_tokens=400),
    data=DataConfig(sources=({data!r},), seq_len=24, batch_size=2, piece_lengths=(8, 24)),
    evaluation=DataConfig(sources=({data!r},), seq_len=24, batch_size=2), evaluation_batches=2,
    eval_lengths=(8, 24),
    optimizer=OptimizerConfig(learning_rate=1e-2), dtype="float32", export_dtype="float32",
    steps={steps}, remat=False, log_every=10, checkpoint_every=4, evaluate_every=16, answers=0,
)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config file for a 4-layer teacher, a few sentences, and the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    architecture = sized(2048, 16, 24, 4, 2, 1, 8)
    model = Transformer(architecture, KVPlan.standard(4))
    params = weights.init(architecture, model.plan, jax.random.key(2))
    sharp = jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, params)  # as drawn, all its logits are alike
    save_pretrained(folder / "teacher", model, sharp)
    words = random.Random(0).choices(
        "a row of keys and values in the cache , made once read often".split(), k=4000
    )
    texts = [" ".join(words[i : i + 20]) for i in range(0, 4000, 20)]
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"text": t, "id": str(i)}) + "\n" for i, t in enumerate(texts))
    )
    text = CONFIG.format(
        model=str(folder / "teacher"),
        tokenizer=str(ROOT / "demo" / "tokenizer"),
        data=str(folder / "data.jsonl"),
        steps=STEPS,
    )
    (folder / "small.py").write_text(text)
    return folder / "small.py"


def command(config: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), "--config", str(config), "--out", str(out), *more]


def run(config: Path, out: Path, *more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(config, out, *more), env=ENVIRONMENT, capture_output=True, text=True, cwd=ROOT, timeout=300
    )


def begun(config: Path, out: Path, *more: str) -> subprocess.Popen:
    """The same, not waited for."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command(config, out, *more), env=ENVIRONMENT, cwd=ROOT, **pipes)


def refused(capsys, config: Path, out: Path, *more: str) -> str:
    """The one line of a run that must not begin; its exit code is 2. In this process: most of a command's
    time is its imports."""
    assert main(command(config, out, *more)[2:]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1, said
    return said


def losses(out: Path) -> dict[int, set[float]]:
    """Every loss that was ever recorded for each step."""
    found: dict[int, set[float]] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        if line.endswith("}") and "loss" in (row := json.loads(line)):
            found.setdefault(row["step"], set()).add(row["loss"])
    return found


def final_state(out: Path) -> dict[str, np.ndarray]:
    """All arrays of the last checkpoint, and the data state, as saved."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(out / "checkpoints") as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(), meta=ocp.args.JsonRestore())
        found = manager.restore(manager.latest_step(), args=args)
    flat = {
        jax.tree_util.keystr(path): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(found.state)
    }
    return flat | {"data": found.meta["meta"]["data"]}


def assert_same_run(out: Path, reference: Path, *files: str) -> None:
    """Bit for bit: parameters, optimiser, key, data state, every recorded loss, and the export."""
    want, got = final_state(reference), final_state(out)
    assert got.pop("data") == want.pop("data")
    assert got.keys() == want.keys()
    assert [name for name in want if got[name].tobytes() != want[name].tobytes()] == []
    assert losses(out) == losses(reference)
    for file in files or ("model.safetensors",):
        ours, theirs = (safetensors.numpy.load_file(o / "export" / file) for o in (out, reference))
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = run(config, out)
    assert done.returncode == 0, done.stderr
    assert sorted(losses(out)) == list(range(1, STEPS + 1))
    return out


def killed_and_resumed(config: Path, out: Path, kills: int, seed: int) -> None:
    """kill -9 at `kills` random moments, start-up, steps and checkpoints alike, then a run to the end."""
    chance = random.Random(seed)
    for number in range(kills):
        more = ["--resume"] if (out / "config.json").exists() else []
        child = begun(config, out, *more)
        goal = chance.randint(number * STEPS // kills, (number + 1) * STEPS // kills)
        began = time.monotonic()
        while child.poll() is None and time.monotonic() - began < 120:
            if (out / "metrics.jsonl").exists() and max(losses(out), default=0) >= goal:
                break
            time.sleep(0.01)
        time.sleep(chance.random() * 0.05)  # anywhere inside a step, or inside an asynchronous save
        child.send_signal(signal.SIGKILL)
        child.communicate()
    done = run(config, out, "--resume")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_kill_9_loses_nothing_but_steps(config, undisturbed, tmp_path):
    killed_and_resumed(config, tmp_path / "run", kills=1, seed=1)
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.soak
def test_twenty_kills_lose_nothing_but_steps(config, undisturbed, tmp_path):
    killed_and_resumed(config, tmp_path / "run", kills=20, seed=2)
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves(config, undisturbed, tmp_path, number, code):
    out = tmp_path / "run"
    child = begun(config, out)
    while not ((out / "metrics.jsonl").exists() and max(losses(out), default=0) >= 5):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(number)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == code, said
    assert "continue with --resume" in said
    assert not (out / "export").exists()
    assert run(config, out, "--resume").returncode == 0
    assert_same_run(out, undisturbed)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_samples(config, tmp_path, capsys):
    sets = ("--set", "optimizer.learning_rate=1e30", "--set", "optimizer.warmup=0.0")
    assert main(command(config, tmp_path / "run", *sets)[2:]) == 1
    said = capsys.readouterr().err
    assert "gradient norm" in said and "samples of the batch: " in said
    assert len(said.strip().splitlines()) == 1


NO_TEACHER = ["--set", "loss.lm_weight=1", "--set", "loss.kl_weight=0"]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--set", "plan.split=9"], "split must be in [1, 4] for 4 layers, not 9"),
        (["--set", "mesh.data=3"], "does not match"),
        (["--set", "attention=splash"], "attention: splash needs a tpu, this is cpu"),
        (["--set", "model=/nowhere/at/all"], "no such folder"),
        (["--set", "tokenizer=/nowhere/at/all"], "tokenizer"),
        (["--set", "data.sources=('nothing.jsonl',)"], "nothing.jsonl"),
        ([*NO_TEACHER, "--set", "trainable=all"], "plan.split 2 is not for"),
        (["--set", "plan.tail=1", "--set", "loss.exit_weight=1.0"], "plan.tail 1 has no exit head"),
        (["--set", "plan.tail=1"], "a tail needs SwiftKV with share 1"),
        (["--compile-only"], "--compile-only and --topology go together"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(config, tmp_path, capsys, more, message):
    assert message in refused(capsys, config, tmp_path / "run", *more)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_the_export_is_the_student(undisturbed):
    """The export holds the trained weights: the checkpoint's masters, merged with the teacher's frozen
    weights."""
    state = {name: x for name, x in final_state(undisturbed).items() if name != "data"}
    export = safetensors.numpy.load_file(undisturbed / "export" / "model.safetensors")
    kernels = [x for name, x in state.items() if "trainable" in name or x.shape == (1, 16, 8)]
    norm = export["model.norm_swiftkv.weight"]
    assert any(np.array_equal(norm, x) for x in state.values() if x.shape == norm.shape)
    assert any(
        np.array_equal(export["model.layers.2.self_attn.k_proj_swiftkv.weight"].T, x[0])
        for x in kernels
        if x.ndim == 3
    )
    assert jnp.asarray(norm).dtype == jnp.float32


@pytest.mark.slow
def test_frozen_weights_in_8_bits_are_exported_as_they_are(config, tmp_path, capsys):
    """Also by a run that is resumed."""
    more = ("quantization=int8", "steps=4", "plan.tail=3", "plan.share=1")
    asked = command(config, tmp_path / "run", *(word for each in more for word in ("--set", each)))[2:]
    assert main(asked) == 0 and main([*asked, "--resume"]) == 0
    assert "resumed from step 4" in capsys.readouterr().out
    _, student = from_pretrained(tmp_path / "run" / "export", cuts=None)
    _, teacher = from_pretrained(config.parent / "teacher", cuts=None, quantization="int8")
    for layer in range(4):
        mine, theirs = (weights.layer(params, layer) for params in (student, teacher))
        jax.tree.map(np.testing.assert_array_equal, mine["mlp"], theirs["mlp"])
        assert mine["mlp"]["up_proj"]["kernel"].dtype == jnp.int8
        assert "scale" in mine["attentions"][0]["q_proj"], "under a tail queries do not train"
    assert "scale" not in weights.row(student, 2)["k_proj"]
    for mine, layer in zip(student["tail_rows"], (2, 3), strict=True):
        theirs = jax.tree.map(lambda leaf: leaf[None], weights.row(teacher, layer))
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)
        assert mine["k_proj"]["kernel"].dtype == jnp.int8


@pytest.mark.slow
def test_two_processes_of_two_devices_train_as_one_device_does(config, tmp_path):
    """Rows are shared out among four devices."""
    few = ("steps=6", "data.batch_size=4", "evaluation.batch_size=4", "checkpoint_every=0")
    sets = [word for field in few for word in ("--set", field)]
    two, one = tmp_path / "two", tmp_path / "one"
    shared = command(config, two, *sets, "--set", "mesh.fsdp=4")
    for done in finish(start([shared] * 2, PYTHONPATH=str(ROOT), **virtual_devices(2)), 900):
        assert done.returncode == 0, done.stderr
    assert main(command(config, one, *sets, "--set", "mesh.fsdp=1")[2:]) == 0
    got, want = losses(two), losses(one)
    assert sorted(got) == sorted(want) == list(range(1, 7))
    assert max(abs(min(got[step]) - min(want[step])) for step in want) < 1e-5


# `train.py` where the weights take ten minutes to read.
LARGE = """
import sys, time
from swiftkv_jax.cli import commands
from swiftkv_jax.distill import start
start.load = lambda *_: time.sleep(600)
sys.exit(commands.train())
"""


ANOTHER = ["--resume", "--set", "plan.share=1"]


@pytest.mark.slow
def test_a_folder_that_holds_another_run_is_refused_by_all_processes(config, undisturbed):
    """Before they read weights."""
    large = [sys.executable, "-c", LARGE, *command(config, undisturbed, *ANOTHER)[2:]]
    began = time.monotonic()
    refused = finish(start([large] * 2, PYTHONPATH=str(ROOT)), 60)
    assert time.monotonic() - began < 30
    for process in refused:
        assert process.returncode == 2, process
        said = process.stderr.splitlines()[-1]
        assert said.startswith(f"error: {undisturbed}") and "another run" in said


ENDLESS = "steps=1000000 optimizer.schedule=constant optimizer.warmup=0.0 checkpoint_every=0 evaluate_every=0"
ENDLESS = [word for field in ENDLESS.split() for word in ("--set", field)]


def reached(out: Path, step: int, started: list[subprocess.Popen]) -> None:
    """Wait until that step is recorded."""
    while not ((out / "metrics.jsonl").exists() and max(losses(out), default=0) >= step):
        assert all(process.poll() is None for process in started)
        time.sleep(0.01)


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_saves_one_step_that_one_resumes_and_then_two(config, tmp_path):
    """So many steps that it ends by the signals alone, with a learning rate that does not depend on them."""
    out = tmp_path / "run"

    def after(step: int, started: list[subprocess.Popen]) -> list[subprocess.CompletedProcess]:
        """SIGTERM to the last process once that step is recorded."""
        reached(out, step, started)
        started[-1].send_signal(signal.SIGTERM)
        done = finish(started, 60)
        assert all(process.returncode == 0 for process in done), [process.stderr for process in done]
        return done

    zero, one = after(5, start([command(config, out, *ENDLESS)] * 2, PYTHONPATH=str(ROOT)))
    (saved,) = [int(path.name) for path in (out / "checkpoints").iterdir()]
    assert f"saved step {saved} in" in zero.stdout and not one.stdout.count("saved")
    assert max(losses(out)) == saved and not (out / "export").exists()
    (alone,) = after(saved + 3, start([command(config, out, *ENDLESS, "--resume")], PYTHONPATH=str(ROOT)))
    assert f"resumed from step {saved}" in alone.stdout
    saved = max(losses(out))
    zero, _ = after(saved + 3, start([command(config, out, *ENDLESS, "--resume")] * 2, PYTHONPATH=str(ROOT)))
    assert f"resumed from step {saved}" in zero.stdout
    assert sorted(losses(out)) == list(range(1, max(losses(out)) + 1))
    assert all(len(found) == 1 for found in losses(out).values())


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_when_one_of_two_processes_is_killed_the_other_ends_and_says_why(config, tmp_path, killed):
    """Process 0 has JAX's coordinator in it: without it JAX aborts at once, else a collective fails."""
    started = start([command(config, tmp_path / "run", *ENDLESS)] * 2, PYTHONPATH=str(ROOT))
    reached(tmp_path / "run", 3, started)
    started[killed].kill()
    began = time.monotonic()
    left = finish(started, 60)[1 - killed]
    assert time.monotonic() - began < 60 and left.returncode not in (0, None)
    assert re.search(LOST, left.stderr, re.M), left.stderr
