"""The measuring process."""

from benchmarks.first_light import engine, kernels, machine, peers
from swiftkv_jax.kernels.check.supervisor import answer_tasks

TASKS = {
    "hardware": machine.hardware,
    "ceilings": machine.ceilings,
    "launches": machine.launches,
    "numerics": kernels.numerics,
    "contest": kernels.contest,
    "peer": peers.peer,
    "engine": engine.measure,
}

if __name__ == "__main__":
    answer_tasks(TASKS)
