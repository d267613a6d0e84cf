"""The models of a server: one, or two side by side, each with its own engine and metrics."""

import asyncio
import dataclasses
import time

from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.queue import Demand
from swiftkv_jax.server.errors import ApiError
from swiftkv_jax.server.metrics import Metrics
from swiftkv_jax.server.service import Service
from swiftkv_jax.server.settings import HttpSettings

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Model:
    """One model with its engine's service and its metrics."""

    def __init__(self, llm: LLM, settings: HttpSettings):
        self.name, self.llm = settings.model_name, llm
        self.fingerprint = llm.fingerprint  # now: it compiles a little, which would hold up the event loop
        self.metrics = Metrics(llm, settings)
        self.service = Service(llm, settings, self.metrics)

    def card(self, created: int) -> dict:
        """The model's entry in `/v1/models`; `created` is in Unix seconds."""
        plan = self.llm.model.plan
        split, share = plan.split_and_share if plan.skipped_layers else (None, None)
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "swiftkv-jax",
            "max_model_len": self.llm.settings.max_model_len,
            "sampling_defaults": {name: getattr(self.llm.defaults, name) for name in _DEFAULTS},
            "layers": plan.num_layers,
            "split": split,
            "share": share,
            "cache_bytes_per_token": self.llm.cache_bytes_per_token,
        }


class Models:
    """The models of one server, and the state of all of them together, which is the server's.

    Attributes:
      first: answers requests that name no model. by_name: all, in the order they were given.
    """

    def __init__(self, llms: dict[str, LLM], settings: HttpSettings):
        """`settings.model_name` is one of `llms`."""
        self.by_name = {
            name: Model(llm, dataclasses.replace(settings, model_name=name)) for name, llm in llms.items()
        }
        self.first = self.by_name[settings.model_name]
        self._services = [model.service for model in self.by_name.values()]
        self._began = time.monotonic()

    def start(self) -> None:
        self._began = time.monotonic()
        for service in self._services:
            service.start()

    def stop(self) -> None:
        """Stop every engine's thread; running requests are dropped."""
        for model in self.by_name.values():
            model.service.stop()
            model.metrics.close()

    @property
    def ready(self) -> bool:
        """Whether every model takes requests."""
        return all(service.ready for service in self._services)

    @property
    def healthy(self) -> bool:
        """Whether every engine has responded lately."""
        return all(service.healthy for service in self._services)

    @property
    def dead(self) -> bool:
        """Whether an engine was given up, so that only a new process helps."""
        return any(service.dead for service in self._services)

    @property
    def reason_of_death(self) -> str:
        """The reason why the server ends, if an engine was given up."""
        return next(service.reason_of_death for service in self._services if service.dead)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused, because of a shutdown."""
        return any(service.draining for service in self._services)

    @property
    def tickets(self) -> int:
        """The number of calls that are being answered."""
        return sum(len(service.admission.tickets) for service in self._services)

    @property
    def progress(self) -> tuple[int, int]:
        """(programs compiled by the warm-up, programs in all)."""
        done, total = zip(*(service.progress for service in self._services), strict=True)
        return sum(done), sum(total)

    @property
    def how_far(self) -> str:
        """`progress` in words, with the seconds left if the other programs take as long as those so far."""
        done, total = self.progress
        count = f"{done} of {total} programs"
        if not done:
            return count
        return f"{count}, about {(total - done) * (time.monotonic() - self._began) / done:.0f} s left"

    @property
    def warm(self) -> bool:
        """Whether all programs are compiled, and requests are taken."""
        done, total = self.progress
        return self.ready and done == total

    def check(self, tenant: str) -> None:
        """Check that some model would take the smallest request of this key."""
        refusals: list[ApiError] = []
        for service in self._services:
            try:
                return service.check(tenant, Demand(1))
            except ApiError as error:
                refusals.append(error)
        raise refusals[0]

    async def drain(self) -> None:
        """Refuse new requests; wait for running ones, as long as the settings say."""
        await asyncio.gather(*(service.drain() for service in self._services))
