"""Reports of the Hopper compiler are parsed and kept, tested on made-up reports without a compiler."""

import json

import pytest
from kernel_targets import END, Compiler

REPORT = "    0 bytes stack frame, {0} bytes spill stores, {0} bytes spill loads\n"


@pytest.fixture
def compiler(monkeypatch):
    """One that answers a case by the lines in `said`, under the case's name."""
    made, said = Compiler(), {}
    monkeypatch.setattr(made, "ask", lambda kernel, case: f"{said[case]}\n{END}\n")
    made.said = said
    return made


def told(*kernels: str) -> str:
    return json.dumps({"kernels": kernels, "temp": 1, "arguments": 2, "alias": 3})


def test_a_kernels_spills_are_reported_for_every_case_with_that_kernel(compiler):
    compiler.said |= {
        "first": REPORT.format(8) + told("a"),
        "second": told("a"),
        "third": REPORT.format(0) + told("a", "b"),
    }
    for case in ("first", "second"):
        sizes, said = compiler.compile("k", case)
        assert sizes == {"temp": 1, "arguments": 2, "alias": 3} and "8 bytes spill stores" in said
    said = compiler.compile("k", "third")[1]
    assert "8 bytes spill stores" in said and " 0 bytes spill stores" in said


def test_a_new_compiler_process_reports_again(compiler):
    compiler.said |= {"first": REPORT.format(8) + told("a"), "again": REPORT.format(0) + told("a")}
    compiler.compile("k", "first")
    compiler.close()
    assert "8 bytes" not in compiler.compile("k", "again")[1]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (told("a"), "k case: 0 reports on 1 kernels"),
        (REPORT.format(0) + told("a", "b"), "k case: 1 reports on 2 kernels"),
        (told(), "k case: 0 reports on 0 kernels"),
        ("Traceback (most recent call last):\nValueError: no layout", "ValueError: no layout"),
    ],
    ids=["silent", "one of two", "no kernel", "traceback"],
)
def test_a_kernel_without_a_report_fails(compiler, said, message):
    compiler.said["case"] = said
    with pytest.raises(AssertionError, match=message):
        compiler.compile("k", "case")


def test_a_case_that_failed_is_not_remembered(compiler):
    """Its process may have compiled some of its kernels: it ends, and the next one speaks of them again."""
    compiler.said |= {
        "first": REPORT.format(0) + told("a"),
        "fails": "ValueError",
        "again": REPORT.format(0) + told("a"),
    }
    compiler.compile("k", "first")
    with pytest.raises(AssertionError, match="ValueError"):
        compiler.compile("k", "fails")
    assert compiler.compile("k", "again")[1].count("spill stores") == 1
