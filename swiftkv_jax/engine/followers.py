"""One model on the devices of several processes: process 0 schedules, the others repeat its launches.

Every process has the same `LLM`, and a program of a mesh runs when all processes call it, in the same order
and with the same arguments. A method that calls one is therefore marked `repeated`: process 0 sends its name
and its arrays, which are small, and the others call the same method.
"""

import contextlib
import functools
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize
from jax.sharding import Mesh

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.processes import Channel
from swiftkv_jax.engine.loop import Inputs, Lanes, Survivors
from swiftkv_jax.engine.sampling import Mode, Policy

_KINDS = {kind.__name__: kind for kind in (Inputs, Lanes, Survivors, Policy, Mode)}
_PLAIN = (bool, int, str, type(None))
_SMALL = 2**14  # bytes sent uncompressed; larger ones, such as token biases, are mostly zeros
_NAMES: set[str] = set()  # of methods that are repeated
_numbers = itertools.count()
_R = TypeVar("_R")


class Single:
    """The role of a process that has the whole model on its devices."""

    several = False

    def broadcasting(self, name: str, args: tuple) -> contextlib.AbstractContextManager:
        """A context in which the method `name` runs with these arguments."""
        return contextlib.nullcontext()

    def dismiss(self) -> None:
        """End the others' `messages`."""


class Follower(Single):
    """The role of a process that repeats what process 0 does."""

    several = True

    def __init__(self, channel: Channel):
        self.channel = channel

    def messages(self) -> Iterator[tuple[str, list]]:
        """(method, arguments) of each call to repeat, until process 0 dismisses its followers."""
        while (message := self.channel.receive()) != b"":
            name, args = unpack(message)
            if name not in _NAMES:
                raise ValueError(f"process 0 asks for {name!r}: are all of one version?")
            yield name, args


class Leader(Single):
    """The role of process 0, when the model is on other processes' devices too."""

    several = True

    def __init__(self, channel: Channel):
        self.channel = channel
        self._lock = threading.RLock()  # a server scores prompts on another thread
        self._inside = False

    @contextlib.contextmanager
    def broadcasting(self, name: str, args: tuple) -> Iterator[None]:
        """Send a call to the others, with no other call in between. Calls within it are not sent."""
        with self._lock:
            if inside := self._inside:
                yield
                return
            self.channel.send(pack(name, args))
            self._inside = True
            try:
                yield
            finally:
                self._inside = inside

    def dismiss(self) -> None:
        with self._lock:
            self.channel.send(b"")


def role_in(mesh: Mesh | None) -> Single:
    """Return the role of this process among those of `mesh`.

    All processes of a run must call this equally often, in the same order.
    """
    owners = set() if mesh is None else {device.process_index for device in mesh.devices.flat}
    if len(owners) < 2:
        return Single()
    if idle := set(range(jax.process_count())) - owners:
        used = f"the model is sharded over devices of {len(owners)} of {jax.process_count()} processes"
        raise UsageError(f"{used}, {min(idle)} has nothing to do: use all {jax.device_count()} devices")
    channel = Channel(f"swiftkv/llm{next(_numbers)}")
    return Follower(channel) if jax.process_index() else Leader(channel)


def repeated(method: Callable[..., _R]) -> Callable[..., _R]:
    """Decorate a method of an object with `role`: the followers call it too. They get its positional
    arguments; keyword arguments are local to this process."""
    _NAMES.add(method.__name__)

    @functools.wraps(method)
    def run(self, *args: Any, **own: Any) -> _R:
        with self.role.broadcasting(method.__name__, args):
            return method(self, *args, **own)

    return run


def pack(name: str, args: tuple) -> bytes:
    """One call as bytes, in MessagePack as flax writes it."""

    def plain(value: Any) -> Any:
        if type(value) in _KINDS.values():
            fields = value if isinstance(value, Mode) else jax.tree.leaves(value)
            return [type(value).__name__, *map(plain, fields)]
        return value if isinstance(value, _PLAIN) else np.asarray(value)

    body = msgpack_serialize([name, *map(plain, args)])
    packed = len(body) > _SMALL
    return bytes([packed]) + (zlib.compress(body, 1) if packed else body)


def unpack(message: bytes) -> tuple[str, list]:
    """(method, arguments) of what `pack` made."""

    def meant(value: Any) -> Any:
        return _KINDS[value[0]](*map(meant, value[1:])) if isinstance(value, list) else value

    name, *args = msgpack_restore(zlib.decompress(message[1:]) if message[0] else message[1:])
    return name, [meant(value) for value in args]
