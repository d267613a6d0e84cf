"""Lines of a measurement: what fails costs its process only if that is of no more use, and is told whole."""

import contextlib
import json
import os
import sys
import textwrap

import pytest

from swiftkv_jax.kernels.check.supervisor import Measurement, Supervisor

# A worker that does what it is asked.
STUB = """
import os, sys, time
import jax
from swiftkv_jax.kernels.check.supervisor import tasks

def work():
    yield {"pid": os.getpid(), "env": os.environ.get("OF_LINE")}

def hang():
    yield {"half": 1}
    time.sleep(600)

def die():
    yield {"half": 1}
    print("a last word", file=sys.stderr)
    os.abort()

def fail():
    yield {"half": 1}
    raise NotImplementedError("a refusal " + 5000 * "x")

def fault():
    yield {"half": 1}
    raise jax.errors.JaxRuntimeError("INTERNAL: a device's fault")

for task, args, send in tasks():
    send(globals()[task](**args))
"""


def line(task: str, limit: float = 10.0, least: float = 0.0, group: str = "", **env: str) -> Measurement:
    return Measurement(f"{task} {limit} {group} {env}", task, {}, limit, least, group, env)


@pytest.fixture
def supervisor(tmp_path):
    """One with a limit of two minutes, whose process is the stub."""
    stub = tmp_path / "stub.py"
    stub.write_text(textwrap.dedent(STUB))
    saved: list[str] = []
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = (sys.executable, str(stub))
    supervisor = Supervisor(command, lambda: saved.append(json.dumps(supervisor.results)), 120.0, env)
    with contextlib.closing(supervisor):
        supervisor.saved = saved
        yield supervisor


@pytest.mark.slow
def test_lines_of_a_group_share_a_process(supervisor):
    first, second = supervisor.run(line("work")), supervisor.run(line("work", 11.0))
    assert first["status"] == second["status"] == "done" and first["pid"] == second["pid"]
    other = supervisor.run(line("work", group="other", OF_LINE="yes"))
    assert other["pid"] != first["pid"] and other["env"] == "yes"
    assert not os.path.exists(f"/proc/{first['pid']}")


@pytest.mark.parametrize(
    ("bad", "reason", "details", "goes_on"),
    [
        (line("hang", 0.5), "killed: not finished after 0 s", "", False),
        (line("die"), "its process died: SIGABRT; a last word", "a last word", False),
        (line("fault"), "JaxRuntimeError: INTERNAL: a device's fault", "Traceback", False),
        (line("fail"), f"NotImplementedError: a refusal {290 * 'x'}", 3999 * "x" + "\n", True),
    ],
    ids=lambda value: value.task if isinstance(value, Measurement) else "",
)
def test_a_process_goes_on_after_an_error_and_ends_after_death_time_out_or_a_devices_fault(
    bad, reason, details, goes_on, supervisor
):
    """The end of what it said is kept, and what it yielded before; it is recorded before it starts."""
    found = supervisor.run(bad)
    assert (found["status"], found["reason"], found["half"]) == ("failed", reason, 1)
    assert found.get("details", "").startswith(details) and len(found.get("details", "")) <= 4000
    assert (supervisor._process is not None) == goes_on
    states = [json.loads(text)[bad.name] for text in supervisor.saved]
    assert states[0] == {"status": "running"} and states[-1] == found


def test_a_line_is_skipped_that_needs_more_time_than_is_left(supervisor):
    found = supervisor.run(line("work", least=1000.0))
    assert found["status"] == "skipped" and "pid" not in found and supervisor._process is None


def test_a_process_that_cannot_start_says_so():
    command = (sys.executable, "-c", "raise SystemExit('no device')")
    with contextlib.closing(Supervisor(command, lambda: None, 120.0)) as supervisor:
        result = supervisor.run(line("work"))
    assert (result["status"], result["reason"]) == ("not started", "its process died: exit code 1; no device")
