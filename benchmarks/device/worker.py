"""The measuring process."""

from benchmarks.device import engine, hardware, peer, student, training
from swiftkv_jax.kernels.check.calls import examine
from swiftkv_jax.kernels.check.supervisor import tasks

TASKS = {"hardware": hardware.hardware, "ceilings": hardware.ceilings}
TASKS |= {"examine": examine, "engine": engine.measure, "train": training.train}
TASKS |= {"teacher": student.teacher, "student": student.student, "transformers": peer.transformers}

if __name__ == "__main__":
    for task, args, send in tasks():
        send(TASKS[task](**args))
