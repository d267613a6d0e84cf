"""Runs of train.py as a user starts them: killed, resumed, interrupted, misled; each against the undisturbed
run."""

import json
import os
import random
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

from swiftkv_jax import params as weights
from swiftkv_jax.checkpoint.hf import save_pretrained
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.model import Transformer
from swiftkv_jax.plan import KVPlan

ROOT = Path(__file__).parent.parent.parent
STEPS = 40

CONFIG = """
from swiftkv_jax.distill.config import Experiment, LossConfig, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data import DataConfig

config = Experiment(
    name="small", model={model!r}, tokenizer={tokenizer!r}, plan=PlanConfig(split=2, share=2),
    data=DataConfig(sources=({data!r},), seq_len=24, batch_size=2),
    evaluation=DataConfig(sources=({data!r},), seq_len=24, batch_size=2), evaluation_batches=2,
    optimizer=OptimizerConfig(learning_rate=1e-2), dtype="float32", export_dtype="float32",
    steps={steps}, remat=False, log_every=10, checkpoint_every=4, evaluate_every=16,
)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config file for a 4-layer teacher, a few sentences, and the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    architecture = ModelConfig(
        vocab_size=2048,
        hidden_size=16,
        intermediate_size=24,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    model = Transformer(architecture, KVPlan.standard(4))
    params = weights.init(architecture, model.plan, jax.random.key(0))
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


def environment() -> dict[str, str]:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-tests"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return os.environ | cache | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def run(config: Path, out: Path, *more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(config, out, *more), env=environment(), capture_output=True, text=True, cwd=ROOT, timeout=300
    )


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


def assert_same_run(out: Path, reference: Path) -> None:
    """Bit for bit: parameters, optimiser, key, data state, every recorded loss, and the export."""
    want, got = final_state(reference), final_state(out)
    assert got.pop("data") == want.pop("data")
    assert got.keys() == want.keys()
    assert [name for name in want if got[name].tobytes() != want[name].tobytes()] == []
    assert losses(out) == losses(reference)
    exports = [safetensors.numpy.load_file(o / "export" / "model.safetensors") for o in (out, reference)]
    assert all(exports[0][name].tobytes() == exports[1][name].tobytes() for name in exports[1])


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = run(config, out)
    assert done.returncode == 0, done.stderr
    assert sorted(losses(out)) == list(range(1, STEPS + 1))
    return out


def test_distillation_lowers_the_loss(undisturbed):
    found = losses(undisturbed)
    assert min(found[STEPS]) < 0.5 * max(found[1])


def killed_and_resumed(config: Path, out: Path, kills: int, seed: int) -> None:
    """kill -9 at `kills` random moments, start-up, steps and checkpoints alike, then a run to the end."""
    chance = random.Random(seed)
    for number in range(kills):
        more = ["--resume"] if (out / "config.json").exists() else []
        child = subprocess.Popen(
            command(config, out, *more),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
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


def test_kill_9_loses_nothing_but_steps(config, undisturbed, tmp_path):
    killed_and_resumed(config, tmp_path / "run", kills=3, seed=1)
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_twenty_kills_lose_nothing_but_steps(config, undisturbed, tmp_path):
    killed_and_resumed(config, tmp_path / "run", kills=20, seed=2)
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_leaves(config, undisturbed, tmp_path, number, code):
    out = tmp_path / "run"
    child = subprocess.Popen(
        command(config, out),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    while not ((out / "metrics.jsonl").exists() and max(losses(out), default=0) >= 5):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(number)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == code, said
    assert "go on with --resume" in said
    assert not (out / "export").exists()
    assert run(config, out, "--resume").returncode == 0
    assert_same_run(out, undisturbed)


def test_a_flipped_byte_falls_back_to_the_older_checkpoint(config, undisturbed, tmp_path):
    import shutil

    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    newest = max((out / "checkpoints").iterdir(), key=lambda p: int(p.name))
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    done = run(config, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"checkpoint {STEPS} rejected" in done.stdout and "resumed from step 36" in done.stdout
    assert_same_run(out, undisturbed)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_samples(config, tmp_path):
    done = run(
        config, tmp_path / "run", "--set", "optimizer.learning_rate=1e30", "--set", "optimizer.warmup=0.0"
    )
    assert done.returncode == 1
    assert "gradient norm" in done.stderr and "samples of the batch: " in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "more, message",
    [
        (["--set", "plan.split=9"], "split must be in [1, 4] for 4 layers, not 9"),
        (["--set", "plan.splt=2"], "did you mean 'split'"),
        (["--set", "mesh.data=3"], "does not match"),
        (["--set", "model=/nowhere/at/all"], "no such folder"),
        (["--set", "tokenizer=/nowhere/at/all"], "tokenizer"),
        (["--set", "data.sources=('nothing.jsonl',)"], "nothing.jsonl"),
        (["--compile-only"], "--compile-only and --topology go together"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(config, tmp_path, more, message):
    done = run(config, tmp_path / "run", *more)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_resume_with_another_model_is_refused(config, undisturbed):
    done = run(config, undisturbed, "--resume", "--set", "plan.share=1")
    assert done.returncode == 2 and "belongs to another run" in done.stderr


def test_a_second_run_does_not_overwrite_the_first(config, undisturbed):
    done = run(config, undisturbed)
    assert done.returncode == 2 and "already holds a run" in done.stderr


def test_no_write_permission_is_one_line(config):
    done = run(config, Path("/proc/nowhere"))
    assert done.returncode == 2 and "cannot write to /proc/nowhere" in done.stderr


def test_the_export_is_the_student(undisturbed):
    """What was exported is what was trained: the checkpoint's masters, merged with the teacher's frozen
    weights."""
    state = {name: x for name, x in final_state(undisturbed).items() if name != "data"}
    export = safetensors.numpy.load_file(undisturbed / "export" / "model.safetensors")
    kernels = [x for name, x in state.items() if "trainable" in name or x.shape == (16, 1, 8)]
    norm = export["model.norm_swiftkv.weight"]
    assert any(np.array_equal(norm, x) for x in state.values() if x.shape == norm.shape)
    assert any(
        np.array_equal(export["model.layers.2.self_attn.k_proj_swiftkv.weight"].T, x[:, 0])
        for x in kernels
        if x.ndim == 3
    )
    assert jnp.asarray(norm).dtype == jnp.float32
