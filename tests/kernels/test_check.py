"""The check of kernels on a machine: only what is right and faster is chosen, whatever a candidate does."""

import dataclasses
import json
import os
import time
from pathlib import Path
from unittest import mock

import faulty_kernels
import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.kernels.causal_attention import xla as causal_xla
from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION
from swiftkv_jax.kernels.check import calls, decide, machine
from swiftkv_jax.kernels.check.calls import verdict
from swiftkv_jax.kernels.check.decide import Limits, choose
from swiftkv_jax.kernels.check.machine import Machine
from swiftkv_jax.kernels.check.supervisor import Supervisor
from swiftkv_jax.kernels.common.case import Call
from swiftkv_jax.kernels.common.dispatch import Implementation
from swiftkv_jax.kernels.fused_kv_fill.api import FUSED_KV_FILL
from swiftkv_jax.kernels.k_cache_attention import xla as keys_xla
from swiftkv_jax.kernels.k_cache_attention.api import K_CACHE, X_CACHE
from swiftkv_jax.kernels.page_write import reference as write_xla
from swiftkv_jax.kernels.page_write.api import PAGE_WRITE
from swiftkv_jax.kernels.paged_attention import cases as paged
from swiftkv_jax.kernels.paged_attention import xla
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION

HERE = Machine("cpu", "a chip", "1.2.3")
SIZES = {"heads": 4, "kv_heads": 2, "width": 16, "computed": "float32", "stored": "float32", "page": 16}
STEP = {"lanes": 2, "tokens": 64, "block": 32, "spread": (32, 3)}
DECODE = Call(kind="decode", operation="paged_attention", capacity=64, **STEP, **SIZES)
EVERY = (
    DECODE,
    dataclasses.replace(DECODE, kind="chunk"),
    dataclasses.replace(DECODE, kind="fill", operation="fused_kv_fill", dim=24, rows=2),
    dataclasses.replace(DECODE, kind="write", operation="page_write"),
    dataclasses.replace(DECODE, operation="k_cache_attention", row=64, rope=False),
    dataclasses.replace(DECODE, operation="x_cache_attention", row=40),
    dataclasses.replace(DECODE, kind="chunk", operation="x_cache_attention", row=40, stored="int8"),
    dataclasses.replace(DECODE, kind="train", operation="causal_attention", tokens=320, windows=(None, 100)),
)


@pytest.fixture
def strange(monkeypatch):
    """The module of strange implementations, for the process that checks; here their names alone."""
    path = [str(Path(faulty_kernels.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    for name in faulty_kernels.ALL:
        monkeypatch.setitem(PAGED_ATTENTION, name, Implementation(xla.paged_attention))
    return faulty_kernels.__name__


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def anew(monkeypatch) -> list:
    """The supervisors of all checks, of which every candidate fails."""
    made = []

    class Failing(Supervisor):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            made.append(self)

        def run(self, measurement, say=json.dumps):
            return self.results.setdefault(measurement.name, dict(KILLED))

    monkeypatch.setattr(decide, "Supervisor", Failing)
    return made


def kept(folder: Path, table, **more) -> decide.File:
    """The file of a decision about `DECODE` here."""
    folder.mkdir(mode=0o700, exist_ok=True)
    return decide.File(folder, decide.inputs_of([DECODE], HERE, table, None), table)


def sealed(raw: dict) -> str:
    """As `decide.File` writes it."""
    return json.dumps(raw | {"sum": decide._digest(raw)})


@pytest.mark.slow
def test_no_faulty_candidate_is_chosen(strange, folder, monkeypatch):
    table = {"decode": ("reference", "wrong", "leaking", "differing", "aborting")}
    limits = Limits(each=200.0, total=600.0)  # enough on a busy machine
    found = decide.decide([DECODE], HERE, folder, candidates=table, module=strange, limits=limits)
    said = {name.removeprefix("decode: "): line for name, line in found.results.items()}
    assert found.names == {"decode": "reference"} and said["reference"]["right"]
    assert "of the largest number" in said["wrong"]["why"]
    assert "not finite" in said["leaking"]["why"]
    assert said["differing"]["why"].endswith("two runs differ")
    assert said["aborting"]["reason"].startswith("its process died: SIGABRT")
    assert "* reference" in decide.table(found) and "not right: blocks of 1: off by" in decide.table(found)
    # A second start runs nothing, and is told the same.
    monkeypatch.setattr(decide, "Supervisor", None)
    again = decide.decide([DECODE], HERE, folder, candidates=table, module=strange, limits=limits)
    assert (again.names, again.results) == (found.names, found.results)
    assert again.how == "as checked on a chip"


@pytest.mark.slow
def test_a_hanging_candidate_is_killed_within_the_limits(strange, folder):
    """A candidate that is not done in time is killed too, even the safe one, which is chosen all the same."""
    limits, began = Limits(each=2.0, total=30.0), time.monotonic()
    table = {"decode": ("reference", "hanging")}
    found = decide.decide([DECODE], HERE, folder, candidates=table, module=strange, limits=limits)
    assert time.monotonic() - began < limits.total + 10
    assert found.names == {"decode": "reference"}
    assert found.results["decode: hanging"]["status"] != "done"


@pytest.mark.slow
def test_every_kind_of_call_is_checked_and_timed(folder):
    """XLA's own implementations are checked and timed in this process."""
    two = ("xla", "reference")
    every = (two, ("xla",), ("unfused", "xla"), *[("xla",)] * 4, two)
    for call, names in zip(EVERY, every, strict=True):
        for name in names:
            found: dict = {"status": "done"}
            for part in calls.examine(dataclasses.asdict(call), name, names[0], None):
                found |= part
            assert decide.is_right(found), (call.kind, name, found)
            sizes = {
                "decode": {"1 x 32", "2 x 32"},
                "chunk": {"64 at 0", "2 x 32 at 0"},
                "fill": {"64 tokens"},
                "write": {"64 tokens", "2 x 1"},
                "train": {"320", "320, window 100"},
            }
            assert decide.sizes_of(found).keys() == sizes[call.kind]


@jax.custom_vjp
def _steeper(x):
    return x


_steeper.defvjp(lambda x: (x, None), lambda _, slope: (1.1 * slope,))
KEYS = dataclasses.replace(EVERY[4], kv_heads=4, stored="int8")
TRAINED, OF_KEYS, OF_INPUTS = (
    (CAUSAL_ATTENTION, EVERY[-1], causal_xla.causal_attention),
    (K_CACHE, KEYS, keys_xla.k_cache_attention),
    (X_CACHE, EVERY[-3], keys_xla.x_cache_attention),
)
WRONG = {  # a table with a call of it and who is right; what is changed of the arguments; what is said
    "crosses samples": (
        TRAINED,
        lambda q, k, v, segments, *rest: (q, k, v, 0 * segments, *rest),
        "sums: off",
    ),
    "gradient": (TRAINED, lambda q, k, v, *rest: (q, k, _steeper(v), *rest), "gradient of v: off by"),
    "keys": (OF_KEYS, lambda q, k, *rest: (q.at[:, :, 0].mul(1.1), k, *rest), "of the largest number"),
    "exchanged": (OF_INPUTS, lambda q, x, w_k, w_v, *rest: (q, x, w_v, w_k, *rest), "of the largest number"),
    "of another row": (OF_INPUTS, lambda q, x, *rest: (q, x[::-1], *rest), "are not finite"),
}


@pytest.mark.slow("exchanged", "keys", "of another row")
@pytest.mark.parametrize("of, change, why", WRONG.values(), ids=WRONG)
def test_attention_that_is_wrong_is_found(of, change, why, monkeypatch):
    table, call, right = of
    monkeypatch.setitem(table, "wrong", Implementation(lambda *args, **how: right(*change(*args), **how)))
    (found,) = calls.examine(dataclasses.asdict(call), "wrong", "xla", None)
    assert not found["right"] and why in found["why"]


@pytest.mark.parametrize("change", ["driver", "source", "version", "flags", "shape", "candidates"])
def test_kernels_are_checked_again_when_inputs_of_the_decision_change(change, folder, anew, monkeypatch):
    table = {"decode": ("xla", "reference")}

    def ask(call=DECODE, here=HERE, candidates=table):
        return decide.decide([call], here, folder, candidates=candidates)

    kept(folder, table).write({"decode: reference": timed(0.5)}, {"decode": "reference"})
    assert ask().names == {"decode": "reference"} and not anew
    match change:
        case "driver":
            ask(here=dataclasses.replace(HERE, driver="1.2.4"))
        case "source":
            monkeypatch.setattr(machine, "source", lambda: "other")
            ask()
        case "version":
            monkeypatch.setattr(machine, "versions", lambda: {"jaxlib": "0"})
            ask()
        case "flags":
            monkeypatch.setenv("XLA_FLAGS", "--xla_other")
            ask()
        case "shape":
            ask(call=dataclasses.replace(DECODE, lanes=3))
        case "candidates":
            ask(candidates={"decode": ("xla", "reference", "xla_one_turn")})
    assert len(anew) == 1


def _another_name(text: str) -> str:
    return text.replace('"decode": "reference"', '"decode": "xla"')


def _another_key(text: str) -> str:
    raw = json.loads(text)
    del raw["sum"]
    raw["inputs"]["machine"]["driver"] = "9"
    return sealed(raw)


def _no_such_name(text: str) -> str:
    raw = json.loads(text)
    del raw["sum"]
    return sealed(raw | {"names": {"decode": "evil"}})


@pytest.mark.parametrize(
    "spoil",
    [_another_name, _another_key, _no_such_name, lambda text: text[:-20], lambda text: text + " " * 2**21]
    + [lambda _, text=text: text for text in ("", "[1]", "[" * 100_000, '{"sum": 3}')],
    ids="name key no_such_name truncated long empty list nested fields".split(),
)
def test_a_tampered_result_file_is_ignored_and_kernels_are_checked_again(spoil, folder, anew, caplog):
    table = {"decode": ("xla", "reference")}
    file = kept(folder, table)
    file.write({"decode: reference": timed(0.5)}, {"decode": "reference"})
    file.path.write_text(spoil(file.path.read_text()))
    found = decide.decide([DECODE], HERE, folder, candidates=table)
    assert found.names == {"decode": "xla"} and len(anew) == 1
    assert "checked again" in caplog.text


def test_a_folder_that_others_can_write_is_not_trusted(folder, anew, caplog):
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    table = {"decode": ("xla", "reference")}
    assert decide.decide([DECODE], HERE, folder, candidates=table).names == {"decode": "xla"}
    assert len(anew) == 1 and "must be writable by you alone (chmod 700)" in caplog.text


class Fake(Supervisor):
    """One that answers from a table, without a process."""

    answers: dict
    ran: list
    left = 100.0

    def run(self, measurement, say=json.dumps):
        self.ran.append(measurement.name)
        self.results[measurement.name] = {"status": "running"}
        self.save()
        result = self.answers[measurement.name.removeprefix("decode: ")]
        if isinstance(result, BaseException):
            raise result
        self.results[measurement.name] = result
        return result


def timed(mine: float, beside: float = 1.0, **more) -> dict:
    sizes = {name: {"seconds": mine, "beside": beside, "off": 0.0} for name in ("1 x 32", "2 x 32")}
    return {"status": "done", "right": True, "why": "", "error": 0.0} | sizes | more


@pytest.fixture
def book(monkeypatch):
    monkeypatch.setattr(decide, "Supervisor", Fake)
    monkeypatch.setattr(Fake, "ran", [], raising=False)
    monkeypatch.setattr(Fake, "answers", {"xla": timed(1.0), "reference": timed(0.5)}, raising=False)
    return Fake


TWO = {"decode": ("xla", "reference")}


def test_a_kernel_that_crashed_the_machine_is_not_tried_again(book, folder):
    """A candidate is recorded on disk before it runs; a later process that finds the record skips it."""
    book.answers["reference"] = SystemExit()  # as if everything ended here

    def ends(results, *statuses):
        if statuses == ("running",):
            raise SystemExit
        return dict(results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decide, "_without", ends)
        with pytest.raises(SystemExit):
            decide.decide([DECODE], HERE, folder, candidates=TWO)
    book.answers["reference"] = timed(0.5)
    found = decide.decide([DECODE], HERE, folder, candidates=TWO)
    assert book.ran == ["decode: xla", "decode: reference"]
    assert found.names == {"decode": "xla"}
    assert "died when this ran" in found.results["decode: reference"]["reason"]


THREE = {"decode": ("xla", "reference", "xla_one_turn")}


KILLED = {"status": "failed", "reason": "killed: not finished after 4 s"}


def test_a_check_that_ran_out_of_time_continues_at_the_next_start(book, folder, monkeypatch):
    """The one that was killed as all time was used up is checked again too."""
    late = {"status": "skipped", "reason": "needs 1 s, 0 s are left"}
    book.answers |= {"reference": dict(KILLED), "xla_one_turn": late}
    monkeypatch.setattr(book, "left", 0.0)
    found = decide.decide([DECODE], HERE, folder, candidates=THREE)
    assert found.names == {"decode": "xla"} and not found.kept
    assert found.how.endswith("in part; the next start continues")
    book.answers |= {"reference": timed(0.5), "xla_one_turn": timed(0.6)}
    for _ in range(2):
        found = decide.decide([DECODE], HERE, folder, candidates=THREE)
        assert found.names == {"decode": "reference"} and found.kept
    again = ["decode: reference", "decode: xla_one_turn"]
    assert book.ran == ["decode: xla", *again, *again]


@pytest.mark.parametrize("ended", [KILLED, KILLED | {"status": "not started"}], ids=["killed", "no process"])
def test_a_machine_that_is_always_too_slow_stops_checking(ended, book, folder, monkeypatch):
    """Every start settles one candidate: the first, which had all the time."""
    monkeypatch.setattr(book, "left", 0.0)
    for start, name in enumerate(THREE["decode"]):
        book.answers |= {other: dict(ended) for other in THREE["decode"]} | {name: dict(KILLED)}
        found = decide.decide([DECODE], HERE, folder, candidates=THREE)
        assert found.names == {"decode": "xla"} and bool(found.kept) == (start == 2)
    count = len(book.ran)
    assert decide.decide([DECODE], HERE, folder, candidates=THREE).kept and len(book.ran) == count == 6


def test_if_no_worker_process_starts_no_result_is_stored(book, folder):
    book.answers["xla"] = {"status": "not started", "reason": "JAX found a cpu here, not a tpu"}
    found = decide.decide([DECODE], HERE, folder, candidates=TWO)
    assert found.names == {"decode": "xla"} and "JAX found a cpu here" in found.how and not found.kept
    assert not list(folder.glob("*.json"))


@pytest.mark.parametrize("taken", [False, True])
def test_out_of_memory_beside_another_process_is_not_remembered(taken, book, folder):
    book.answers["reference"] = {"status": "failed", "reason": "XlaRuntimeError: RESOURCE_EXHAUSTED: ..."}
    found = decide.decide([DECODE], HERE, folder, candidates=TWO, taken=taken)
    assert found.names == {"decode": "xla"} and bool(list(folder.glob("*.json"))) != taken


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        ({"b": timed(0.94)}, "b"),
        ({"b": timed(0.96)}, "a"),
        ({"b": timed(0.5) | {"2 x 32": {"seconds": 0.96, "beside": 1.0, "off": 0.0}}}, "a"),  # not at each
        ({"b": timed(0.9), "c": timed(0.8)}, "c"),
        ({"b": timed(0.9), "c": timed(0.8, status="failed")}, "b"),
        ({"b": timed(0.9), "c": timed(0.8, right=False)}, "b"),
        ({"b": timed(0.9), "c": timed(0.8) | {"1 x 32": {"seconds": 0.8, "beside": 1.0, "off": 0.1}}}, "b"),
        ({"a": timed(1.0, right=False), "b": timed(1.0)}, "b"),  # the safe one is wrong here
        ({"a": timed(1.0, right=False)}, "a"),
    ],
)
def test_the_fastest_right_one_wins_by_five_per_cent_at_every_size(lines, want):
    found = {f"decode: {name}": line for name, line in ({"a": timed(1.0)} | lines).items()}
    assert choose("decode", ("a", "b", "c"), found) == want


def judged(call: Call, name: str) -> dict:
    return verdict(calls.OPERATIONS[call.operation].case.checked(call), name)


def ignoring_windows(*args, window=None, **options):
    return xla.paged_attention(*args, window=None, **options)


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_numbers_are_checked_with_windows_and_8_bit_rows(stored, monkeypatch):
    monkeypatch.setitem(PAGED_ATTENTION, "ignoring", Implementation(ignoring_windows))
    sizes = {"lengths": (0, 5, 107), "queries": (0, 5, 7), "block": 4, "window": 40}
    case = paged.Case(**sizes, **SIZES | {"stored": stored})
    assert verdict([("", case)], "xla")["right"]
    said = verdict([("", case)], "ignoring")
    assert "not finite" in said["why"]
    q, *_ = case.make()[0]
    assert q.shape == (5, 4, 4, 16)  # blocks of four, one of them without a query


def test_a_table_is_as_wide_as_the_engine_s():
    """Its entries behind a sequence's tokens name a page of NaN."""
    case = paged.Case(lengths=(21,), capacity=512, **SIZES)
    (_, k, _, table, _, _), _ = case.make()
    assert table.shape == (1, 32) and bool(jnp.isnan(k[:, table[0, 8:]]).all())
    assert verdict([("", case)], "xla_one_turn")["right"]


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["int8"])
def test_a_fill_that_writes_other_pages_is_wrong(stored, monkeypatch):
    def straying(x, makers, cos, sin, pools, names, live, **options):
        made = FUSED_KV_FILL["xla"].run(x, makers, cos, sin, pools, names, live, **options)
        other = jnp.argmin(jnp.zeros(made.k.shape[1], bool).at[names].set(True, mode="drop"))
        return made._replace(v=made.v.at[0, other, 0, 0].add(1))

    def shifted(x, makers, cos, sin, pools, names, live, **options):
        made = FUSED_KV_FILL["xla"].run(x, makers, cos, sin, pools, names, live, **options)
        return made._replace(k=made.k.at[0, names[0]].set(0))

    for function in (straying, shifted):
        monkeypatch.setitem(FUSED_KV_FILL, function.__name__, Implementation(function))
    call = dataclasses.replace(EVERY[2], stored=stored)
    assert judged(call, "xla")["right"]
    assert "memory was written" in judged(call, "straying")["why"]
    assert "of the largest number" in judged(call, "shifted")["why"]


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_a_writer_that_touches_other_places_is_wrong(stored, monkeypatch):
    def straying(pool, new, page, slot, *, rows):
        data, scale = write_xla.page_write(pool, new, page, slot, rows=rows)
        return pool._replace(data=data.at[rows[0], page[0], slot[0] + 1].set(0), scale=scale)

    def late(pool, new, page, slot, *, rows):
        return write_xla.page_write(pool, new, page, jnp.maximum(slot - 1, 0), rows=rows)

    for function in (straying, late):
        monkeypatch.setitem(PAGE_WRITE, function.__name__, Implementation(function))
    call = dataclasses.replace(EVERY[3], stored=stored)
    assert judged(call, "xla") == {"right": True, "why": "", "error": mock.ANY}
    assert "memory was written" in judged(call, "straying")["why"]
    assert not judged(call, "late")["right"]
