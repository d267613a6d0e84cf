"""The wheel, as pip would install it, in an empty folder far from any clone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import wheels

import swiftkv_jax as skv

LARGEST = 10_000_000  # bytes; the demo's model and corpus are nearly all of it


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    return wheels.install(wheel, tmp_path_factory.mktemp("site"))


def test_the_wheel_brings_all_code_the_demo_the_configs_and_the_types(wheel, site):
    assert wheel.stat().st_size < LARGEST
    package = site / "swiftkv_jax"
    for theirs in ("demo/teacher", "demo/tokenizer", "configs"):
        names = {path.name for path in (wheels.ROOT / theirs).iterdir() if path.is_file()}
        assert names == {path.name for path in (package / theirs).iterdir() if path.is_file()} and names
    assert (package / "demo" / "corpus.jsonl.xz").is_file() and (package / "py.typed").is_file()
    for folder in (wheels.ROOT / "swiftkv_jax", wheels.ROOT / "kernels"):
        place = package / "kernels" if folder.name == "kernels" else package
        code = [path for path in folder.rglob("*") if path.suffix in (".py", ".cc", ".h")]
        assert code and all((place / path.relative_to(folder)).is_file() for path in code)
    assert {path.name for path in site.iterdir()} == {
        "swiftkv_jax",
        f"swiftkv_jax-{skv.__version__}.dist-info",
    }


@pytest.mark.slow
def test_serve_answers_with_the_demo_from_the_wheel_alone(site, tmp_path):
    program = (
        "import sys; sys.argv[0] = 'swiftkv-serve'\n"
        "from swiftkv_jax.cli.commands import serve; sys.exit(serve())"
    )
    flags = "--input - --output - --max-tokens 2 --num-pages 8 --max-model-len 128".split()
    done = subprocess.run(
        [sys.executable, "-c", program, *flags],
        input='{"prompt": "The cache"}\n',
        env=wheels.environment(site),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"model     {site / 'swiftkv_jax' / 'demo' / 'teacher'} (" in done.stderr
    assert json.loads(done.stdout)["text"]
