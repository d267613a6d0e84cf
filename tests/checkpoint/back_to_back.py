"""Saves checkpoints back to back in a process that is killed: the other half of the kill tests.

python back_to_back.py DIR        one line in = seconds until `kill -9`; one line out = last step known safe
"""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp

from swiftkv_jax.checkpoint.training import Checkpointer


def state_at(step: int):
    """A state whose every leaf tells its step."""
    weights = jax.random.normal(jax.random.key(step), (64, 96))
    half = weights.astype(jnp.bfloat16)
    return {"weights": weights, "half": half, "count": jnp.int32(step), "more": (weights * 2, -weights)}


def save_for_ever(directory: str, out: int) -> None:
    checkpointer = Checkpointer(directory, keep=2)
    found = checkpointer.restore(jax.eval_shape(lambda: state_at(0)))
    step = 0 if found is None else found[0]
    while True:
        step += 1
        checkpointer.save(step, state_at(step), {"step": step})
        if step > 1:
            os.write(out, f"{step - 1}\n".encode())  # `save` has waited for the step before


def main(directory: str) -> None:
    assert "orbax.checkpoint" not in sys.modules, "importing the library must not import Orbax"
    import orbax.checkpoint  # noqa: F401  once, before the forks

    for line in sys.stdin:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            save_for_ever(directory, write)
        os.close(write)
        safe = os.read(read, 4096)  # it is under way
        time.sleep(float(line))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(read, 4096):
            safe += more
        os.close(read)
        print(safe.split()[-1].decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
