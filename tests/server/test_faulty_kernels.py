"""`serve.py --http` comes up with the safe kernels, whatever the candidates of its check do."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import faulty_kernels
import httpx
import pytest
from http_server import ROOT, started

from swiftkv_jax.kernels.check.decide import LIMITS

HERE = Path(__file__).parent
SMALL = "--max-num-seqs 2 --max-num-batched-tokens 64 --max-model-len 128 --no-warm-up".split()
LONGEST = LIMITS.total + 10  # seconds that a first start may take
CHECKS, KEPT = "checking kernels on this a GPU, once", "as checked on a GPU"


@contextlib.contextmanager
def begun(kept: Path, until: str, tree: Path = ROOT, path: tuple[Path, ...] = ()):
    """A server of the code in `tree` that has said a line that begins with `until`: its address and lines.

    `path`: folders that Python looks into first.
    """
    folders = (*path, tree, Path(faulty_kernels.__file__).parent)
    command = [sys.executable, str(HERE / "faulty_served.py"), str(kept), str(tree / "serve.py")]
    command += ["--http", "127.0.0.1:0", *SMALL]
    paths = os.pathsep.join(map(str, folders))
    with started(command, until, PYTHONPATH=paths) as (_, url, said):
        yield url, said


def asked(url: str) -> tuple[str, str]:
    """A greedy answer of the server, and the labels of the metric that names its kernels."""
    body = {"prompt": "The function", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        answer = client.post("/v1/completions", json=body)
        metrics = client.get("/metrics").text
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8, answer.text
    return answer.json()["choices"][0]["text"], re.findall(r"kernels_info\{(.*)\}", metrics)[0]


@dataclasses.dataclass
class First:
    """The first start on a machine."""

    kept: Path
    found: dict
    seconds: float
    said: list[str]
    text: str
    kernels: str


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> First:
    kept, start = tmp_path_factory.mktemp("kept"), time.monotonic()
    with begun(kept, "ready") as (url, said):
        text, kernels = asked(url)
        seconds = time.monotonic() - start
    (path,) = kept.glob("*.json")
    return First(kept, json.loads(path.read_text()), seconds, said, text, kernels)


@pytest.mark.slow
def test_a_server_answers_within_the_limit_of_the_check_whatever_candidates_do(first):
    """Each of them ran, and what was wrong with it was found."""
    assert first.seconds < LONGEST
    assert any(line.startswith(CHECKS) for line in first.said)
    assert 'decode="xla_one_turn"' in first.kernels and 'how="checked on a GPU in' in first.kernels
    assert first.found["names"] == {"decode": "xla_one_turn", "chunk": "xla_one_turn"}
    lines = {name.removeprefix("decode: "): line for name, line in first.found["results"].items()}
    assert lines.keys() == {"xla_one_turn", *faulty_kernels.FAULTY} and lines["xla_one_turn"]["right"]
    assert "of the largest number" in lines["wrong"]["why"]
    assert "not finite" in lines["leaking"]["why"]
    assert lines["differing"]["why"].endswith("two runs differ")
    assert lines["aborting"]["reason"].startswith("its process died: SIGABRT")
    assert lines["hanging"]["reason"] == f"killed: not finished after {LIMITS.each:.0f} s"


@pytest.mark.slow
def test_a_second_start_checks_nothing_and_chooses_within_200_ms(first):
    """Of processor time: others may be busy."""
    with begun(first.kept, "ready") as (url, said):
        text, kernels = asked(url)
    assert not any(line.startswith(CHECKS) for line in said)
    assert 'decode="xla_one_turn"' in kernels and f'how="{KEPT}"' in kernels and text == first.text
    (took,) = re.findall(r"^chosen in ([\d.]+) s", "".join(said), re.M)
    assert float(took) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["source", "version"])
def test_kernels_are_checked_again_after_a_change_of_source_or_version(first, changed, tmp_path):
    """A comment in a kernel's file; another version of a package, as far as Python can tell."""
    tree, path = ROOT, ()
    if changed == "source":
        tree = tmp_path
        shutil.copytree(ROOT / "swiftkv_jax", tree / "swiftkv_jax")
        shutil.copy(ROOT / "serve.py", tree)
        with (tree / "swiftkv_jax/kernels/paged_attention/xla.py").open("a") as file:
            file.write("# changed\n")
    else:
        path = (tmp_path,)
        other = tmp_path / "jax_cuda13_plugin-9.9.9.dist-info"
        other.mkdir()
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-cuda13-plugin\nVersion: 9.9.9\n")
    with begun(first.kept, CHECKS, tree, path) as (_, said):
        assert not any(line.startswith("ready") for line in said)
