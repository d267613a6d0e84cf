"""`train.py --compile-only` and `swiftkv plan --compile-serving`: the real programs, compiled for chips that
are not here. Needs the `aot` extra."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from documents import ROOT, shell

pytestmark = pytest.mark.aot
LLAMA = ROOT / "swiftkv_jax" / "configs" / "architectures" / "llama8b.json"


@functools.cache
def compile_only(*arguments):
    """As `run`; what several tests ask for is compiled once."""
    return run("train.py", "--compile-only", *arguments)


def run(*words):
    """(exit code, stdout, stderr) of a process of its own: libtpu and the CUDA plugin are loaded once."""
    ours = ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD")  # the commands see to these
    env = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    return done.returncode, done.stdout, done.stderr


def plan(model, where, *words):
    return run("-m", "swiftkv_jax", "plan", str(model), "--compile-serving", "--topology", where, *words)


def gib(out: str) -> tuple[float, float]:
    used, capacity = re.search(r"needed / memory\s+([\d.]+) GiB of ([\d.]+) GiB", out).groups()
    return float(used), float(capacity)


@pytest.mark.parametrize(
    ("where", "devices", "capacity", "least", "attention", "sets"),
    [
        ("v4:2x2x4", 16, 32.0, 55, "splash (assumed; the check on the device decides)", ()),
        ("v5p:2x2x4", 16, 95.0, 55, "splash (assumed; the check on the device decides)", ()),
        ("v5e:4x4", 16, 16.0, 55, "splash (assumed; the check on the device decides)", ()),
        ("v6e:4x4", 16, 32.0, 55, "splash (assumed; the check on the device decides)", ()),
        ("h100:1x1x8", 8, 79.11, 55, "cudnn (assumed; the check on the device decides)", ()),
        ("h100:1x1x8", 8, 79.11, 40, "xla (named)", ("--set", "attention=xla")),
        ("a100:1x1x8", 8, 80.0, 40, "xla (assumed; the check on the device decides)", ()),
    ],
    ids=["v4", "v5p", "v5e", "v6e", "h100", "h100 with xla", "a100"],
)
def test_the_8b_step_fits_and_may_be_fast(where, devices, capacity, least, attention, sets):
    """least: per cent of MFU that FLOPs and bytes moved allow."""
    code, out, err = compile_only("--config", "configs/llama8b.py", "--topology", where, *sets)
    assert code == 0, err
    assert f"{devices} devices" in out
    assert re.search(r"^  attention +(.*)$", out, re.M)[1] == attention
    assert "402.7 M" in out  # SwiftKV paper, appendix A.1: about 5 % of the parameters train
    used, has = gib(out)
    assert has == capacity
    found = re.search(r"bound on MFU +(\d+)%", out)
    assert found and int(found[1]) >= least, out
    # fp32 masters and two moments of 402.7 M parameters, and 8 B parameters in bf16, over all devices.
    assert used * devices > (402.7e6 * 12 + 8.03e9 * 2) / 2**30
    # Weights are gathered, gradients scattered; the TPU compiler overlaps the latter as permutes in a ring.
    assert "all-gather" in out and ("reduce-scatter" in out or "collective-permute" in out)


@pytest.mark.parametrize(
    ("config", "where", "trained"),
    [
        ("llama8b_kvp_1b", "v5p:2x2x4", "1,269.4 M"),
        ("llama8b_kvp_1b", "h100:1x1x8", "1,269.4 M"),
        ("llama70b_kvp_8b", "h100:1x2x8", "8,198.2 M"),
    ],
)
def test_the_step_that_trains_a_predictor_fits(config, where, trained):
    code, out, err = compile_only("--config", f"configs/{config}.py", "--topology", where)
    assert code == 0, err
    assert trained in out
    used, has = gib(out)
    assert used < has


@pytest.mark.parametrize("topology", ["h100:1x1x8", "v5p:2x2x4"])
def test_the_step_of_latents_and_experts_fits(topology):
    """XLA's attention runs: no other kernel has values narrower than keys."""
    code, out, err = compile_only("--config", "configs/deepseek_v2_lite.py", "--topology", topology)
    assert code == 0, err
    assert re.search(r"^  attention +xla ", out, re.M)
    assert "114.8 M" in out  # 12 layers of q, kv_a and kv_b, their norms, and the shared norm
    used, has = gib(out)
    assert used < has


@pytest.mark.parametrize(
    "config", ["llama3_2_1b", "qwen2_5_0_5b", "qwen2_5_1_5b", "qwen3_0_6b", "qwen3_4b", "smollm2_1_7b"]
)
def test_the_recipes_for_one_gpu_fit_an_h100(config):
    code, out, err = compile_only("--config", f"configs/{config}.py", "--topology", "h100:1x1x1")
    assert code == 0, err
    used, has = gib(out)
    assert used < has == 79.11


def test_one_chip_is_too_small():
    code, out, err = compile_only("--config", "configs/llama8b.py", "--topology", "v5e:1x1")
    assert code == 1, err
    assert "not fit" in out


@pytest.mark.parametrize("where", ["v4:2x2x1", "h100:1x1x4"])
def test_an_engines_programs_share_weights_cache_and_heads(where, tmp_path):
    """Of Llama-3.1-8B's layers 4: serving compiles each one by itself, the others alike."""
    layers, architecture = 4, json.loads(LLAMA.read_text())
    (tmp_path / "config.json").write_text(json.dumps(architecture | {"num_hidden_layers": layers}))
    code, out, err = plan(tmp_path, where, "--context", "4096")
    assert code == 0, err
    assert "pallas_" in out
    held, cache = re.search(r"weights ([\d.]+) GiB, cache ([\d.]+) GiB \(65,536 tokens\)", out).groups()
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    assert float(held) == pytest.approx(2 * (2 * 128256 * 4096 + layers * layer) / 4 / 2**30, abs=0.01)
    assert float(cache) == pytest.approx(65536 * layers * 2 * 8 * 128 * 2 / 4 / 2**30, abs=0.01)
    programs = re.findall(
        r"^(\w+), .*? ([\d.]+) GiB +(\d+) +\d+ s  .*?(\d+) all-reduce \(([\d.]+) MB", out, re.M
    )
    assert [name for name, *_ in programs] == ["decode", "prompt", "step"]
    for name, temporary, launches, sums, moved in programs:
        tokens = 16 if name == "decode" else 2048
        assert 2 * layers <= int(sums) <= 2 * layers + 4  # the attention and the MLP of each
        assert layers * tokens * 4096 * 2 / 1e6 <= float(moved) <= 5 * layers * tokens * 4096 * 2 / 1e6
        most = 130 if where.startswith("v4") else 40  # a TPU's copies into VMEM are launches: 449 seen
        assert float(temporary) < 0.4 and 8 * layers < int(launches) < most * layers


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("h10:1x1x4", "did you mean 'h100'"),
        ("h100:1x1x3", "3 devices cannot share 32 query heads and 8 kv heads"),
        ("v5e:1x1", "does not fit v5e:1x1"),
    ],
)
def test_what_cannot_serve_a_model_is_one_line(where, said):
    code, out, err = plan(LLAMA, where)
    error = err.strip().splitlines()[-1]  # libtpu prints warnings before it
    assert code == 2 and not out and said in error and error.startswith("error: ")


@pytest.mark.parametrize("command", shell(r".* --compile-only "), ids=str)
def test_a_command_of_the_documents_compiles_and_fits(command):
    python, script, *words = shlex.split(command.text)
    assert (python, script) == ("python", "train.py")
    code, out, err = compile_only(*(word for word in words if word != "--compile-only"))
    assert code == 0, err
    used, has = gib(out)
    assert used < has
