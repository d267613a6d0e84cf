"""Several processes of one run (jax.distributed): joint start, agreement, and joint end."""

import contextlib
import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from swiftkv_jax.common.errors import LONGEST, UsageError, first_line

START_S = 300  # how long a process waits for the others to start
HEARTBEAT_S = 50  # a process that is silent for so long is dead, and the others end
SHUTDOWN_S = 30  # how long the others wait for a process that does not reach the end with them
LEAVE_S = 5  # the same, after an error
_BLOCK = 256  # messages that are dropped together
_LOST = re.compile("Gloo|NCCL|coordination.service|Connection (closed|reset)")  # in errors of joint work
_MPI = (  # Open MPI; MPICH, Intel MPI; MVAPICH2: how many processes, which is this, which on its host
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
)
_BEFORE_PODS = ("OMPI_MCA_orte_hnp_uri", "SLURM_JOB_ID", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
_BYTES = 4 * LONGEST  # of one process's message: the longest UsageError in UTF-8


class PeerLost(RuntimeError):
    """Another process of the run has ended, and the run cannot continue without it."""


def start(wanted: bool | None, environ: Mapping[str, str]) -> None:
    """Join the other processes, before anything else asks JAX for its devices.

    JAX finds its peers by itself under SLURM, Open MPI 4, Kubernetes jobs (JobSet) and Cloud TPUs. Anywhere
    else, the variables JAX_COORDINATOR_ADDRESS (`host:port` of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID name them; under any mpirun the first is enough.

    Args:
      wanted: True joins or refuses; False runs alone; None joins where a launcher is found.
      environ: the environment's variables.
    """
    if wanted is False:
        return
    named = "JAX_COORDINATOR_ADDRESS" in environ
    mpi = next((names for names in _MPI if names[0] in environ), None)
    many, rank, local = (_number(environ, name) for name in mpi) if mpi else (None, None, None)
    count = _number(environ, "JAX_NUM_PROCESSES", many) if named else None
    index = _number(environ, "JAX_PROCESS_ID", rank) if named else None
    if named and not re.fullmatch(r".+:\d+", environ["JAX_COORDINATOR_ADDRESS"]):
        address = environ["JAX_COORDINATOR_ADDRESS"]
        raise UsageError(f"JAX_COORDINATOR_ADDRESS must be HOST:PORT of process 0, not {address!r}")
    apart = named and "JAX_LOCAL_DEVICE_IDS" not in environ
    # JAX would take any pod for one of an indexed job: a server's pod would not start, or not without the
    # rights to ask for its job.
    indexed = "JOB_COMPLETION_INDEX" in environ and (count is None or index is None)
    pod = "KUBERNETES_SERVICE_HOST" in environ and not any(name in environ for name in _BEFORE_PODS)

    def give_up() -> None:
        address = environ.get("JAX_COORDINATOR_ADDRESS")
        where = f" and whether JAX_COORDINATOR_ADDRESS={address} can be reached from here" if address else ""
        missing = f"not all processes of this run started within {START_S} s; see which is missing{where}"
        print(f"error: {missing}", file=sys.stderr, flush=True)
        os._exit(1)

    late = threading.Timer(START_S, give_up)
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            num_processes=count,
            process_id=index,
            # One GPU for each process, as JAX does under SLURM.
            local_device_ids=[local] if apart and local is not None else None,
            cluster_detection_method="deactivate" if pod and not indexed else None,
            initialization_timeout=10 * START_S,  # at its end JAX would abort
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except Exception as error:  # also one of a client of Kubernetes
        named_by = "JAX_COORDINATOR_ADDRESS (HOST:PORT of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        why = first_line(error)
        if isinstance(error, ValueError) and "be defined" in why:
            if not (wanted or named or (many or 1) > 1):
                return
            why = "JAX does not find the others by itself"  # of MPI, only Open MPI 4 says where process 0 is
        advice = f"set {named_by}, or give --no-distributed"
        raise UsageError(f"this process cannot join a run of several: {why}; {advice}") from error
    finally:
        late.cancel()


def leave(code: int) -> None:
    """Call before a failed process ends: waits at most `LEAVE_S` for the others, which may be dead."""
    if code == 0 or not jax.distributed.is_initialized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    late = threading.Timer(LEAVE_S, os._exit, (code,))
    late.daemon = True
    late.start()
    jax.distributed.shutdown()
    late.cancel()


@contextlib.contextmanager
def reporting_lost_peers() -> Iterator[None]:
    """Context for joint work of all processes: errors caused by the end of another one become PeerLost."""
    try:
        yield
    except Exception as error:
        if _alone() or isinstance(error, UsageError | PeerLost) or not _LOST.search(str(error)):
            raise
        reason = first_line(error)
        raise PeerLost(f"another process of this run has ended, so this one ends too ({reason})") from error


def is_first() -> bool:
    """Whether this is process 0, the only one that writes files and prints."""
    return _alone() or jax.process_index() == 0


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Context for local work of each process: if it fails in one, all raise, so that none waits for another.

    All processes enter and leave it at the same place of the program; nothing inside may wait for another
    process. The UsageError of the first process that has one is raised in all. Any other error is raised
    where it happened, and elsewhere as a RuntimeError that names the process.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if _alone():
            raise
        failure = error
    usage = isinstance(failure, UsageError)
    mine = f"usage:{failure}" if usage else failure and f"failure:{first_line(failure)}"
    messages = _gather_text(mine or "")
    first = next((index for index, text in enumerate(messages) if text), None)
    if first is None:
        return
    kind, _, message = messages[first].partition(":")
    if kind == "usage":
        raise UsageError(message) from failure
    raise failure or RuntimeError(f"process {first}: {message}")


def check_same(what: str, value: str) -> None:
    """Refuse a value that is not the same in every process, before it makes them do different things."""
    digests = _gather_text(hashlib.sha256(value.encode()).hexdigest())
    other = next((index for index, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise UsageError(f"{what} of process {other} differs from that of process 0; give all the same")


def any_process(flag: bool) -> bool:
    """Whether `flag` is true in any process, the same answer in all; also a barrier."""
    return bool(_gather(flag).any())


def least(value: int) -> int:
    """The least of all processes' values, in every process."""
    return int(_gather(np.int32(value)).min())


def from_first(value: int) -> int:
    """Process 0's value, in every process."""
    return int(_gather(np.int32(value))[0])


def text_from_first(name: str, make: Callable[[], str], limit_s: float) -> str:
    """Broadcast the result of `make` in process 0 to every process, without asking JAX for its devices.

    `name` is the same in all processes; the others wait at most `limit_s` seconds.
    """
    if not jax.distributed.is_initialized():
        return make()
    client, index = _coordination()
    if index:
        return client.blocking_key_value_get(name, int(1000 * limit_s))
    text = make()
    client.key_value_set(name, text, allow_overwrite=True)
    return text


def _coordination() -> tuple[Any, int]:
    """JAX's client of the coordination service, and the number of this process."""
    from jax._src import distributed

    return distributed.global_state.client, distributed.global_state.process_id


class Channel:
    """Messages of process 0 to all others, which read them in order. They use JAX's coordination service; no
    device is involved."""

    def __init__(self, name: str):
        """`name` is the same in all processes, and no other channel's."""
        self._client, self._name, self._count = _coordination()[0], name, 0

    def send(self, message: bytes) -> None:
        """Send a message, in process 0. Messages that all have read are dropped, a block at a time."""
        self._next(lambda block: self._client.key_value_delete(block))
        self._client.key_value_set_bytes(self._key(), message)

    def receive(self) -> bytes:
        """The next message, in each other process; waits as long as it takes. Process 0 has ended if this
        raises a JaxRuntimeError."""
        self._next(lambda block: None)
        while True:
            try:
                return self._client.blocking_key_value_get_bytes(self._key(), 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def _key(self) -> str:
        return f"{self._name}/{self._count // _BLOCK}/{self._count}"

    def _next(self, drop: Callable[[str], None]) -> None:
        """Count one more message. All processes meet at the end of a block, when all of it has been read."""
        self._count += 1
        if self._count % _BLOCK == 0:
            block = f"{self._name}/{self._count // _BLOCK - 1}"
            self._client.wait_at_barrier(f"{block}/read", 1000 * START_S)
            drop(block)


class Stop:
    """How several processes stop after the same step, because one of them cannot go on; no step waits for it.

    Every process asks `reached` before each step, once the step before the last one is done. So if one asks
    after step n + 2, step n + 1 is done, and who said before it to stop after n + 2 has been heard.

    Attributes:
      failure: why this process cannot go on. It still takes part in `LAG` steps.
    """

    LAG = 2

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._said = False

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error

    def reached(self, step: int) -> bool:
        """Whether all stop after this step; where this process has failed, it now says when."""
        client, index = _coordination()
        if self.failure is not None and not self._said:
            client.key_value_set(f"stop/{index}", str(step + self.LAG))
            self._said = True
        return any(int(last) <= step for _, last in client.key_value_dir_get("stop/"))


def _alone() -> bool:
    """Whether there is only this process. If none was joined, this does not make JAX look for devices."""
    return not jax.distributed.is_initialized() or jax.process_count() == 1


def _gather(value) -> np.ndarray:
    """The value of every process, by process index."""
    if _alone():
        return np.asarray(value)[None]
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(np.asarray(value))


def _gather_text(text: str) -> list[str]:
    """The text of every process, cut to `_BYTES`, by process index."""
    raw = np.frombuffer(text.encode()[:_BYTES].ljust(_BYTES, b"\0"), np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in _gather(raw)]


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int | None:
    text = environ.get(name)
    try:
        return default if text is None else int(text)
    except ValueError:
        raise UsageError(f"{name} must be a number, not {text!r}") from None
