"""Processes that tests start: several of one run, as a launcher would; one with many virtual devices."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

LOST = "^error: .*process|Terminating process because the JAX distributed service"  # our own words, or JAX's
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "JAX_COORDINATOR", "KUBERNETES_")


def virtual_devices(count: int) -> dict[str, str]:
    """The variable that gives a process so many CPU devices: it gets them at its start or never."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return {"XLA_FLAGS": flags.strip()}


def environments(count: int, slurm: bool = False, **more: str) -> list[dict[str, str]]:
    """The variables of each process, of one CPU device each: our own for JAX, or those that srun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    base = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    base |= {"JAX_PLATFORMS": "cpu"} | more
    if not slurm:
        base |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
        return [base | {"JAX_PROCESS_ID": str(i)} for i in range(count)]
    base |= {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(count)}
    base |= {"JAX_COORDINATOR_PORT": port}
    return [base | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(count)]


def start(commands: list[list[str]], slurm: bool = False, **more: str) -> list[subprocess.Popen]:
    """One process for each command, in order of their ids; stdout and stderr are pipes of text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pairs = zip(commands, environments(len(commands), slurm, **more), strict=True)
    return [subprocess.Popen(command, env=env, **pipes) for command, env in pairs]


def finish(started: list[subprocess.Popen], seconds: float = 240) -> list[subprocess.CompletedProcess]:
    """The output and exit code of each process; none is left running."""
    try:
        said = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, *s) for p, s in zip(started, said, strict=True)]


def found_on(devices: int, worker: str, *args: str) -> dict:
    """The JSON that `tests/<worker>` writes in a process of so many virtual devices."""
    env = os.environ | virtual_devices(devices)
    env |= {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(ROOT / "tests" / worker), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
