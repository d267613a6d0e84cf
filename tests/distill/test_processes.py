"""Several processes of one run: what they agree on, and what makes one join others."""

import json
import re
import sys
from pathlib import Path

import jax
import pytest
from processes_made import finish, start

from swiftkv_jax.common import processes
from swiftkv_jax.common.errors import UsageError

DIFFERS = "the config of process 1 differs from that of process 0; give all the same"
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_an_error_in_one_process_is_raised_in_all():
    command = [sys.executable, str(Path(__file__).with_name("agreeing.py"))]
    done = finish(start([command, command], PYTHONPATH=str(ROOT)))
    assert [d.returncode for d in done] == [0, 0], done
    zero, one = (json.loads(d.stdout.splitlines()[-1]) for d in done)
    assert zero.pop("first") and not one.pop("first")
    for report, failed in ((zero, "OSError: disk full"), (one, "RuntimeError: process 0: disk full")):
        assert report.pop("failed in 0") == failed
    assert zero.pop("failed in 0, refused by 1") == "RuntimeError: died"
    assert one.pop("failed in 0, refused by 1") == "UsageError: no"
    both = {
        "processes": 2,
        "well": "",
        "refused by 1": "UsageError: no such folder: é",
        "refused by both": "UsageError: said by 0",
        "same": "",
        "not the same": f"UsageError: {DIFFERS}",
        "any": [False, True],
        "from the first": 7,
    }
    assert zero == both and one == both


def named(address: str) -> dict[str, str]:
    """The variables of the second of two processes."""
    return {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    "wanted, environ, said",
    [
        (True, {}, "set JAX_COORDINATOR_ADDRESS"),
        (None, {"OMPI_COMM_WORLD_SIZE": "4"}, "set JAX_COORDINATOR_ADDRESS"),
        (None, {"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
        (None, {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "x"}, "must be a number, not 'x'"),
        (None, named("a"), "must be HOST:PORT of process 0, not 'a'"),
    ],
)
def test_processes_that_cannot_be_joined_are_one_line(wanted, environ, said, monkeypatch):
    def initialize(num_processes, process_id, **limits):
        """Fail as JAX's own function does if no launcher is found."""
        if "JAX_COORDINATOR_ADDRESS" not in environ:
            raise ValueError("coordinator_address should be defined.")
        if num_processes is None:
            raise ValueError("Number of processes must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(UsageError, match=re.escape(said)):
        processes.start(wanted, environ)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_whose_peers_never_start_fails_in_one_line(index):
    """JAX would call abort(); and what it wrote before is not lost."""
    program = "import os, sys; from swiftkv_jax.common import processes; processes.START_S = 1\n"
    program += "print('before', file=sys.stderr); processes.start(None, os.environ)"
    command = [sys.executable, "-c", program]
    commands = [[sys.executable, "-c", ""]] * 2
    commands[index] = command
    done = finish(start(commands, PYTHONPATH=str(ROOT)), 60)[index]
    before, error = done.stderr.splitlines()
    assert (done.returncode, before) == (1, "before") and error.startswith("error: not all processes")


SOCKET = (
    "UNAVAILABLE: Socket closed\nAdditional GRPC error information from remote target coordination_service"
)


@pytest.mark.parametrize(
    "error", ["UNKNOWN: Gloo AllGather failed: Connection closed by peer\nat 3", SOCKET], ids=["Gloo", "JAX"]
)
def test_joint_work_that_lost_its_peer_says_so(error, monkeypatch):
    monkeypatch.setattr(processes, "_alone", lambda: False)
    with pytest.raises(processes.PeerLost), processes.reporting_lost_peers():
        raise ValueError(error)
    with pytest.raises(ValueError, match=r"^no$"), processes.reporting_lost_peers():
        raise ValueError("no")
