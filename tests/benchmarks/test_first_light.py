"""`benchmarks.first_light`: whatever a candidate does, the run goes on, and only what is right may win."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from benchmarks.first_light import __main__ as command
from benchmarks.first_light import engine, report
from benchmarks.first_light.candidates import HERE, HOPPER, Candidate
from benchmarks.first_light.kernels import by_token
from benchmarks.first_light.peers import PEERS, peer
from swiftkv_jax import cache
from swiftkv_jax.kernels.check.cases import Attention
from swiftkv_jax.kernels.check.supervisor import Book, Failed, Line, Worker

ROOT = Path(__file__).parents[2]

# A worker that does what it is asked, without jax.
STUB = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    task = json.loads(line)["task"]
    if task == "hang":
        print(json.dumps({"part": {"half": 1}}), flush=True)
        time.sleep(600)
    if task == "die":
        print("a last word", file=sys.stderr)
        os.abort()
    print(json.dumps({"part": {"pid": os.getpid(), "env": os.environ.get("OF_LINE")}}), flush=True)
    print(json.dumps({"failed": "no"} if task == "fail" else {"done": True}), flush=True)
"""

# Decoding by XLA with something wrong about it.
STRANGE = """
import os, time
from benchmarks.first_light.candidates import Candidate
from swiftkv_jax.kernels.common.dispatch import Implementation
from swiftkv_jax.kernels.paged_attention import api, xla

def wrong(*args, **options):
    return xla.paged_attention(*args, **options).at[-1, 0, 1, 5].multiply(1.5)

def hanging(*args, **options):
    time.sleep(600)

def aborting(*args, **options):
    os.abort()

ALL = (wrong, hanging, aborting)
CANDIDATES = tuple(Candidate("decode", f.__name__, limit=2.0 if f is hanging else 60.0) for f in ALL)

def register():
    api.PAGED_ATTENTION.update({f.__name__: Implementation(f) for f in ALL})
"""


def line(task: str, limit: float = 10.0, least: float = 0.0, group: str = "", **env: str) -> Line:
    return Line(f"{task} {limit} {group} {env}", task, {}, limit, least, group, env)


@pytest.fixture
def book(tmp_path):
    """A book with a limit of a minute and the stub as its worker."""
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    saved: list[str] = []
    worker = (sys.executable, str(stub))
    book = Book(worker, lambda result: saved.append(json.dumps(result)), 1.0, {}, dict(os.environ))
    book.saved = saved
    yield book
    book.close()


def test_lines_of_a_group_share_a_process(book):
    first, second = book.run(line("work")), book.run(line("work", 11.0))
    assert first["status"] == second["status"] == "done" and first["pid"] == second["pid"]
    other = book.run(line("work", group="other", OF_LINE="yes"))
    assert other["pid"] != first["pid"] and other["env"] == "yes"
    assert not os.path.exists(f"/proc/{first['pid']}")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (line("hang", 0.5), "killed: not finished after 0 s"),
        (line("die"), "its process died: SIGABRT; a last word"),
        (line("fail"), "no"),
    ],
    ids=["hangs", "dies", "fails"],
)
def test_a_failing_measurement_ends_only_its_own_process(bad, reason, book):
    before = book.run(line("work"))
    found = book.run(bad)
    assert (found["status"], found["reason"]) == ("failed", reason)
    assert found.get("half", 1) == 1  # what it had told is kept
    after = book.run(line("work", 11.0))
    assert after["status"] == "done" and after["pid"] != before["pid"]
    assert json.loads(book.saved[-1])["lines"][bad.name] == found


def test_a_measurement_that_exceeds_the_remaining_time_is_not_started(book):
    found = book.run(line("work", least=100.0))
    assert found["status"] == "skipped" and "pid" not in found and book.worker is None


def test_a_measurement_is_recorded_as_running_before_it_starts(book):
    book.run(line("die"))
    states = [next(iter(json.loads(text)["lines"].values()))["status"] for text in book.saved]
    assert states == ["running", "failed"]


def test_a_worker_that_cannot_start_says_so():
    worker = Worker((sys.executable, "-c", "raise SystemExit('no device')"), {})
    with pytest.raises(Failed, match="exit code 1; no device"):
        worker.wait_ready()
    worker.close()


@pytest.mark.slow
def test_no_faulty_candidate_is_chosen_and_the_run_continues(tmp_path, monkeypatch):
    (tmp_path / "strange.py").write_text(STRANGE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = command.of("tiny", "strange")
    candidates = [c for c in found if c.kind == "decode" and "interpreted" not in c.implementation]
    path = tmp_path / "out.json"
    sizes = command.shape_of("tiny")
    head = {"command": "c", "date": "d"}
    book = Book(command.WORKER, lambda result: command.save(path, sizes, candidates, result), 5.0, head)
    try:
        command.kernel_lines(book, "tiny", candidates, "strange")
    finally:
        book.close()
    lines = json.loads(path.read_text())["lines"]
    said = {c.implementation: lines[report.line_of("numerics", c)] for c in candidates}
    assert said["xla"]["right"] and said["xla_one_turn"]["right"]
    assert "of the largest number" in said["wrong"]["why"]
    assert said["hanging"]["reason"] == "killed: not finished after 2 s"
    assert said["aborting"]["reason"].startswith("its process died: SIGABRT")
    timed = {c.implementation for c in candidates if report.line_of("contest", c) in lines}
    assert timed == {"xla", "xla in turns", "xla_one_turn"}
    winner, _, page = json.loads(path.read_text())["winners"]["decode"].partition(", ")
    assert winner in timed and page == "page 64"
    assert "| numerics: decode, wrong, page 64 | WRONG" in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_killed_supervisor_leaves_its_results_so_far(tmp_path):
    flags = ["--shape", "tiny", "--output", str(tmp_path)]
    run = subprocess.Popen([sys.executable, "-m", "benchmarks.first_light", *flags], cwd=ROOT)
    path, lines = tmp_path / "first_light_tiny.json", {}
    while "done" not in (states := [found["status"] for found in lines.values()]) or "running" not in states:
        assert run.poll() is None
        time.sleep(0.02)
        lines = json.loads(path.read_text())["lines"] if path.exists() else {}
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert json.loads(path.read_text())["lines"]["hardware"]["status"] == "done"


@pytest.mark.soak
def test_a_run_of_the_tiny_shape(tmp_path):
    flags = ["--shape", "tiny", "--output", str(tmp_path), "--minutes", "20"]
    subprocess.run([sys.executable, "-m", "benchmarks.first_light", *flags], cwd=ROOT, check=True)
    result = json.loads((tmp_path / "first_light_tiny.json").read_text())
    lines, text = result["lines"], (tmp_path / "first_light_tiny.md").read_text()
    assert {name: found for name, found in lines.items() if found["status"] != "done"} == {}
    assert all(report.is_right(lines, c) for c in HERE)
    standard, half = (lines[f"engine: 4 layers, {plan}"] for plan in ("standard", "SwiftKV 50 %"))
    gain = result["goals"]["SwiftKV 50 %, times the standard's tokens/s"][1]
    assert gain == pytest.approx(half["tokens_per_s"] / standard["tokens_per_s"])
    assert all(got is not None for _, got in result["goals"].values())
    assert all(name in text for name in [*lines, *result["winners"].values()])


class SlowBook:
    """Every line takes 25 s of a clock of its own, and finds what it checks right."""

    def __init__(self, worker, save, minutes, head, env=None):
        self.left, self.result, self.begun = 60.0 * minutes, {"lines": {}, **head}, []
        SlowBook.last = self

    def run(self, line, say):
        if self.left < line.least:
            return self.result["lines"].setdefault(line.name, {"status": "skipped"})
        self.left -= 25
        self.begun.append(line)
        found = {"status": "done", "right": True, "platform": "gpu", "xla_flags": ""}
        return self.result["lines"].setdefault(line.name, found)

    def close(self):
        pass


def test_engines_are_measured_however_slow_the_kernels_are(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "Book", SlowBook)
    (tmp_path / "first_light.md").touch()
    monkeypatch.setattr("sys.argv", ["first_light", "--output", str(tmp_path)])
    assert command.main() == 0
    begun = SlowBook.last.begun
    names = [line.name for line in begun if line.task == "engine"]
    assert [f"engine: 8 layers, {plan}" for plan in engine.PLANS] == names[:3]
    # Kinds are measured to the end one after the other: at least decoding is.
    decode = [line for line in begun if line.args.get("candidate", {}).get("kind") == "decode"]
    assert [line.task for line in decode] == ["numerics"] * 4 + ["contest"] * 4


def contest(seconds: dict[str, float], **more) -> dict:
    sizes = {
        name: {"seconds": s, "bytes": 1.0, "flops": 1.0, "off": 0.0} | more for name, s in seconds.items()
    }
    return {"status": "done"} | sizes


SAFE, FAST, EVEN, PAGE = (
    Candidate("decode", "xla"),
    Candidate("decode", "fast"),
    Candidate("decode", "even"),
    Candidate("decode", "fast", page=128),
)


@pytest.mark.parametrize(
    ("times", "right", "want"),
    [
        ({"a": 0.5, "b": 0.94}, True, FAST),
        ({"a": 0.5, "b": 0.96}, True, SAFE),  # not ahead at every size
        ({"a": 0.5}, True, SAFE),  # not timed at every size
        ({"a": 0.5, "b": 0.5}, False, SAFE),
    ],
)
def test_the_winner_is_right_and_ahead_at_every_size(times, right, want):
    lines = {
        report.line_of("numerics", FAST): {"status": "done", "right": right},
        report.line_of("numerics", SAFE): {"status": "done", "right": True},
        report.line_of("contest", SAFE): contest({"a": 1.0, "b": 1.0}),
        report.line_of("contest", FAST): contest(times),
    }
    assert report.winner(lines, [SAFE, FAST], "decode") == want


def test_the_fastest_of_those_ahead_wins_unless_it_is_off_or_has_other_pages():
    lines = {
        report.line_of("numerics", c): {"status": "done", "right": True} for c in (SAFE, FAST, EVEN, PAGE)
    }
    for c, seconds in ((SAFE, 1.0), (FAST, 0.5), (EVEN, 0.9), (PAGE, 0.4)):
        lines[report.line_of("contest", c)] = contest({"a": seconds})
    every = [SAFE, FAST, EVEN, PAGE]
    assert report.winner(lines, every, "decode") == PAGE
    assert report.winner(lines, every, "decode", page=64) == FAST
    lines[report.line_of("contest", FAST)] = contest({"a": 0.5}, off=0.1)
    assert report.winner(lines, every, "decode", page=64) == EVEN
    lines[report.line_of("contest", PAGE)] |= {"status": "failed"}
    assert report.winner(lines, every, "decode", page=128).implementation == "xla"


def test_pages_and_blocks_do_not_change_the_numbers():
    """Candidates are compared on the same keys and queries by token, however pages and blocks are cut."""
    sizes = {"heads": 4, "kv_heads": 2, "width": 16, "computed": "float32", "stored": "float32"}
    found = []
    for page, block in ((64, 3), (128, 0)):
        case = Attention(sequences=((100, 7), (0, 5), (0, 0)), page=page, block=block, **sizes)
        (q, k, _, table, _, _), _ = case.make()
        assert k.shape[1] == table.size + 3 and bool((k != k).any())
        found.append((by_token(case, q), k[1, table[0]].reshape(-1, 32)[:107]))
        assert by_token(case, q)[1, 5:].sum() == 0 and bool((k[1, table[1]].reshape(-1, 32)[5:] != 0).all())
    for one, other in zip(*found, strict=True):
        assert (one == other).all() and bool((one == one).all())
    # 100 keys before the first query, one more for each after it; and those of the other prompt.
    assert case.flops == 4 * 4 * 16 * (sum(range(101, 108)) + 15)
    assert case.bytes == 112 * 2 * 2 * 16 * 4


def test_the_winners_have_one_name_by_kind_of_call(monkeypatch):
    monkeypatch.setattr(engine, "PAGED_ATTENTION", dict(engine.PAGED_ATTENTION))
    case = Attention(
        sequences=((0, 4),),
        heads=2,
        kv_heads=2,
        width=16,
        computed="float32",
        stored="float32",
        page=64,
        block=0,
    )
    asked = []

    def of(name):
        return engine.dispatch.Implementation(lambda *_, **__: asked.append(name), lambda *_, **__: name)

    engine.PAGED_ATTENTION |= {"one": of("one"), "many": of("many")}
    name = engine.register_winners(Candidate("decode", "one"), Candidate("chunk", "many"))
    (q, *args), arrays = case.make()
    made = engine.PAGED_ATTENTION[name]
    assert [made.refuses(x, *args, **arrays) for x in (q, q[:, :1])] == ["many", "one"]
    monkeypatch.setitem(engine.PAGED_ATTENTION, "one", engine.dispatch.Implementation(lambda *_, **__: "ran"))
    assert made.run(q[:, :1], *args, **arrays) == "ran"


def test_a_block_of_a_prompt_can_be_set(monkeypatch):
    """There is no setting for it: when the cache cuts blocks by another name, this says so."""
    monkeypatch.setattr(cache, "QUERY_BLOCK", cache.QUERY_BLOCK)
    engine.set_block(7)
    assert max(cache.block_size(tokens, 1) for tokens in range(1, 300)) == 7


@pytest.mark.parametrize(("kind", "name"), PEERS)
def test_peers_of_the_winners_are_correct(kind, name):
    """On a CPU: the Triton kernel interpreted, XLA in cuDNN's place."""
    found = {size: value for part in peer("tiny", kind, name) for size, value in part.items()}
    sizes = command.shape_of("tiny")
    wanted = sizes.decodes if kind == "decode" else sizes.contexts
    assert len(found) == len(wanted)
    assert all(value["off"] < report.OFF and value["seconds"] > 0 for value in found.values())


def test_xla_is_the_first_candidate_of_each_kind():
    for found in (HOPPER, HERE):
        assert {c.kind: c.implementation for c in reversed(found)} == dict.fromkeys(
            command.report.KINDS, "xla"
        )
        assert len({(c.kind, c.name) for c in found}) == len(found)


def test_without_a_gpu_it_says_not_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["first_light", "--output", str(tmp_path)])
    assert command.main() == 1
    assert json.loads((tmp_path / "first_light.json").read_text()) == {"measured": False}
    assert "Not measured: no GPU was available" in (tmp_path / "first_light.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--minutes", "0"], "--minutes must be positive, not 0"),
        (["--candidates", "no_such"], "--candidates no_such: No module named 'no_such'; name a module that"),
        (["--candidates", "json"], "--candidates json: module 'json' has no attribute 'CANDIDATES'; name"),
        (["--shape", "70b"], "invalid choice: '70b'"),
    ],
)
def test_bad_usage(flags, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["first_light", *flags])
    with pytest.raises(SystemExit) as raised:
        command.main()
    assert raised.value.code == 2 and message in capsys.readouterr().err
