"""The notebooks: run in an empty folder with the wheel installed; what they keep; how they install it."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import wheels

NOTEBOOKS = {path.stem: path for path in sorted((wheels.ROOT / "notebooks").glob("*.ipynb"))}
SOURCE = re.compile(r'^SOURCE = ""$', re.MULTILINE)
# Settings of the notebooks, and what replaces them here so that a run takes fewer tokens.
SMALLER = {
    '"evaluation_batches=8"': '"evaluation_batches=2", "plan.init_tokens=4096"',
    "init_tokens=16_384": "init_tokens=4_096",
    '"plan.init_tokens": 16_384': '"plan.init_tokens": 4_096',
    "--tokens 16384": "--tokens 4096",
}
LARGEST_PLOT = 60_000  # bytes
# A cell that begins with %%bash is bash, as in Jupyter. What the last line asks for is the test's own.
RUN = """
import json, subprocess, sys
sources, wanted = json.load(sys.stdin)
names = {}
for source in sources:
    if source.startswith("%%bash\\n"):
        subprocess.run(["bash", "-c", source.partition("\\n")[2]], check=True)
    else:
        exec(source, names)
print(json.dumps({name: names[name] for name in wanted}, default=str))
"""


def cells(name: str, kind: str = "code") -> list[dict]:
    """The cells of a notebook that are of one kind; their sources as one string each."""
    found = json.loads(NOTEBOOKS[name].read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in found if cell["cell_type"] == kind]


def smaller(source: str) -> str:
    for old, new in SMALLER.items():
        source = source.replace(old, new)
    return source


def printed(name: str) -> list[str]:
    """The kept output of each cell that prints something."""
    said = ("".join("".join(o.get("text", "")) for o in cell["outputs"]) for cell in cells(name))
    return [text for text in said if text]


@pytest.fixture(scope="module")
def lane(request, tmp_path_factory) -> tuple[str, dict[str, str], Path]:
    """(An interpreter, its variables, where it has the wheel): this one beside the tests' packages; and a
    Python 3.12, where there is one, with what pip installs for the wheel and the oldest JAX that it takes."""
    folder, python = tmp_path_factory.mktemp("lane"), wheels.found("python3.12")
    if request.param == "this Python" or python is None:
        site = wheels.install(wheels.build(folder / "wheel"), folder / "site")
        return sys.executable, wheels.environment(site), site
    wheel = f"{wheels.build(folder / 'wheel')}[serve]"
    inside = wheels.virtual(python, folder / "venv", wheel, "openai", "jax==0.11.2")
    return inside, wheels.environment(), folder / "venv"


def of_a_notebook(test):
    """Mark the test of a whole notebook; the first one of a lane also waits for pip."""
    return pytest.mark.slow(pytest.mark.timeout(1800)(test))


def run(lane, name: str, folder: Path, *wanted: str, **variables: str) -> tuple[str, dict]:
    """(stdout, the `wanted` names) of a notebook that ran from end to end, in `folder`/empty."""
    (python, environment, site), empty = lane, folder / "empty"
    empty.mkdir()
    child = subprocess.Popen(
        [python, "-u", "-c", RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=empty,
        env=environment | variables,
        start_new_session=True,
    )
    try:
        sources = [smaller(cell["source"]) for cell in cells(name)]
        request = json.dumps([sources, ["DEMO", *wanted]])
        out, err = child.communicate(request, timeout=1800)
    finally:
        if child.returncode is None:  # with whatever it has started
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 0, err
    said, _, last = out.rstrip("\n").rpartition("\n")
    told = json.loads(last)
    assert Path(told["DEMO"]).is_relative_to(site)
    return said, told


@of_a_notebook
@pytest.mark.parametrize("lane", ["Python 3.12"], indirect=True)
def test_the_quickstart_runs_from_end_to_end(lane, tmp_path):
    """Eight steps of distillation bring the student nearer."""
    said, told = run(lane, "quickstart", tmp_path, "before", "after", STEPS="8")
    assert {line.partition(": '")[0] for line in said.splitlines()[-2:]} == {"teacher", "student"}
    assert all(text in said for text in ("least squares on 4,096 tokens", "done: 8 steps"))
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["runs"]
    (kl_before, agreed_before), (kl_after, agreed_after) = told["before"], told["after"]
    assert 0 < kl_after < 0.1 and 0.8 < agreed_after < 1
    assert kl_after < 0.8 * kl_before and agreed_after > agreed_before


@of_a_notebook
@pytest.mark.parametrize("lane", ["this Python"], indirect=True)
def test_a_checkpoint_is_measured_distilled_and_exported(lane, tmp_path):
    """A later split costs less, sharing more; training and the table use the same held-out text."""
    said, told = run(
        lane, "your_checkpoint", tmp_path, "costs", "last", "after", "exported", "answers", STEPS="8"
    )
    costs = told["costs"]
    by_split = [costs[f"split {split}"] for split in (2, 4, 6)]
    for name in ("gap", "kl"):
        assert [cost[name] for cost in by_split] == sorted((c[name] for c in by_split), reverse=True)
    assert all(0 < cost["kl"] < 0.2 and 0.7 < cost["agreement"] < 1 for cost in costs.values())
    start, after = costs["split 4, share 2"], told["after"]
    assert start["kl"] > costs["split 4"]["kl"]
    evaluated = told["last"]["eval/teacher_cross_entropy"]
    assert evaluated == pytest.approx(start["teacher_cross_entropy"], abs=1e-5)  # the same held-out tokens
    assert after["kl"] < start["kl"] and after["agreement"] > start["agreement"]
    published = ("model_type", "num_key_value_layers", "key_value_group_size")
    assert [told["exported"][name] for name in published] == ["llama_swiftkv", 4, 2]
    assert set(told["answers"]) == {"teacher", "student"} and all(told["answers"].values())
    assert printed("your_checkpoint")[1] in said  # arithmetic, the same everywhere


@of_a_notebook
@pytest.mark.parametrize("lane", ["this Python"], indirect=True)
def test_bytes_and_chips_are_as_kept_and_sharing_costs_quality(lane, tmp_path):
    """Llama-3.1-8B has 8,030,261,248 parameters; a row of its cache is 8 heads of 128, keys and values."""
    said, told = run(lane, "acrosskv_and_memory", tmp_path, "sizes", "weights", "costs")
    assert told["weights"] == 2 * 8_030_261_248
    rows = {"standard": 32, "SwiftKV, share 1": 32, "SwiftKV, share 4": 20, "SwiftKV, share 16": 17}
    for name, count in rows.items():
        assert told["sizes"][name] == [count * 2 * 8 * width for width in (2 * 128, 128 + 4, 128 + 4)]
    assert all(text in said for text in printed("acrosskv_and_memory")[:3])
    costs = [told["costs"][share] for share in ("1", "2", "4")]
    assert [cost["cache_bytes"] for cost in costs] == [1, 0.75, 0.625]
    assert costs[0]["agreement"] > costs[1]["agreement"] > costs[2]["agreement"] > 0.5
    assert 0 < costs[0]["gap"] < costs[1]["gap"] < costs[2]["gap"]
    each = 6 * 2 * 2  # keys and values of 2 heads of 48 in each of 6 rows
    for kind, size in (("float32", each * 48 * 4), ("bfloat16", each * 48 * 2), ("int8", each * (48 + 4))):
        assert re.search(rf"^{kind} +{size:,} ", said, re.MULTILINE)


@of_a_notebook
@pytest.mark.skipif(shutil.which("curl") is None, reason="the notebook asks by curl")
@pytest.mark.parametrize("lane", ["this Python"], indirect=True)
def test_a_server_of_two_models_answers_streams_counts_and_stops(lane, tmp_path):
    """Greedy answers are the same by curl, whole and streamed; the server's counters are what was asked."""
    told_of = ("answers", "streamed", "ttft", "LENGTHS", "ROUNDS", "code")
    said, told = run(lane, "serve_and_compare", tmp_path, *told_of)
    whole = told["answers"]["student"]
    by_curl, _ = json.JSONDecoder().raw_decode(said, said.index('{"id":"cmpl'))
    assert whole and told["streamed"] == whole and whole.startswith(by_curl["choices"][0]["text"])
    asked = told["ROUNDS"] * len(told["LENGTHS"]) + 1
    tokens = 4 + told["ROUNDS"] * sum(told["LENGTHS"])  # the text has four
    labels = '{engine="0",model_name="teacher"}'
    assert f"swiftkv_prompt_tokens_total{labels} {tokens}.0" in said
    assert f"swiftkv_time_to_first_token_seconds_count{labels} {asked}.0" in said
    assert {name: len(times) for name, times in told["ttft"].items()} == {"teacher": 4, "student": 4}
    assert told["code"] == 0


def test_every_setting_that_a_run_replaces_is_in_a_notebook():
    sources = [cell["source"] for name in NOTEBOOKS for cell in cells(name)]
    assert all(any(old in source for source in sources) for old in SMALLER)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_keeps_small_outputs_that_name_no_machine(name):
    code = cells(name)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert {output["name"] for output in outputs if "name" in output} == {"stdout"}
    plots = [output["data"]["image/png"] for output in outputs if "data" in output]
    assert len(plots) == sum("plt.show()" in cell["source"] for cell in code) > 0
    assert all(len(base64.b64decode(plot)) < LARGEST_PLOT for plot in plots)
    said = "".join(printed(name))
    assert not re.search(r"(?<![\w.:/])/(?:home|root|tmp|work|usr|opt|var|content|Users)/", said), said


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    """Empty packages in a folder: this one with its needs of JAX, and three releases of JAX on two chips."""
    folder = tmp_path_factory.mktemp("index")
    project = tomllib.loads((wheels.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [need for need in project["dependencies"] if need.startswith("jax=") or need.startswith("jax>")]
    wheels.hollow(folder, "swiftkv_jax", "0.1.0", *needs)
    for version in ("0.7.2", "0.10.2", "0.11.2", "0.12.0"):
        wheels.hollow(folder, "jax_cuda12_plugin", version)
        wheels.hollow(folder, "libtpu", version)
        chips = (f'jax-cuda12-plugin=={version}; extra == "cuda12"', f'libtpu=={version}; extra == "tpu"')
        wheels.hollow(folder, "jax", version, *chips, extras=("cuda12", "tpu"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "fits"), [("jax-cuda12-plugin", True), ("libtpu", False)])
def test_jax_keeps_its_accelerator_and_a_session_that_has_loaded_an_old_one_ends(
    plugin, fits, index, tmp_path, monkeypatch
):
    """As in Colab, by pip: a JAX that will do stays; another is replaced with its plugin."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    here = ("0.10.2" if sys.version_info < (3, 12) else "0.11.2") if fits else "0.7.2"
    python = wheels.virtual(sys.executable, tmp_path / "venv", f"jax=={here}", f"{plugin}=={here}")
    cell = SOURCE.sub(f'SOURCE = "{next(index.glob("swiftkv*"))}"', cells("quickstart")[0]["source"])
    asked = {"cwd": tmp_path, "env": wheels.environment(), "capture_output": True, "text": True}
    done = subprocess.run([python, "-c", f"import jax\n{cell}"], **asked)
    listed = subprocess.run([python, "-m", "pip", "freeze"], **asked, check=True).stdout
    found = dict(line.split("==") for line in listed.splitlines() if "==" in line)
    assert (found["jax"] == here) == fits and found[plugin] == found["jax"]
    assert done.returncode == (not fits) and ("old jax: restart" in done.stderr) != fits, done.stderr
