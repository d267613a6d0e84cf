"""What a server serves: one model, or two side by side, each with an engine and metrics of its own."""

import asyncio
import dataclasses
import time

from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.queue import Demand
from swiftkv_jax.server.errors import ApiError
from swiftkv_jax.server.generate import Generator
from swiftkv_jax.server.metrics import Metrics
from swiftkv_jax.server.service import Service
from swiftkv_jax.server.settings import HttpSettings
from swiftkv_jax.server.speech import Listener

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class Model:
    """One model, the engine that runs it, and who answers for it.

    `fingerprint` is made with it, and not by the first request: that compiles a little, on the event loop.
    """

    name: str
    fingerprint: str
    llm: LLM
    metrics: Metrics
    service: Service
    generator: Generator
    listener: Listener

    @classmethod
    def of(cls, llm: LLM, settings: HttpSettings) -> "Model":
        metrics = Metrics(llm, settings)
        service = Service(llm, settings, metrics)
        return cls(
            settings.model_name, llm.fingerprint, llm, metrics, service, Generator(service), Listener(service)
        )

    def card(self, created: int) -> dict:
        """What `/v1/models` says of it; `created` is in Unix seconds."""
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
    """The models of one server. What holds of all of them holds of the server.

    Attributes:
      first: answers requests that name no model. by_name: all, in the order they were given.
    """

    def __init__(self, llms: dict[str, LLM], settings: HttpSettings):
        """`settings.model_name` is one of `llms`."""
        self.by_name = {
            name: Model.of(llm, dataclasses.replace(settings, model_name=name)) for name, llm in llms.items()
        }
        self.first = self.by_name[settings.model_name]
        self._services = [model.service for model in self.by_name.values()]
        self._began = time.monotonic()

    def start(self) -> None:
        """Start every engine's thread."""
        self._began = time.monotonic()
        for service in self._services:
            service.start()

    def stop(self) -> None:
        """End them; what still runs is dropped."""
        for model in self.by_name.values():
            model.service.stop()
            model.metrics.close()

    @property
    def ready(self) -> bool:
        """Whether each takes requests."""
        return all(service.ready for service in self._services)

    @property
    def healthy(self) -> bool:
        """Whether each engine has been heard of lately."""
        return all(service.healthy for service in self._services)

    @property
    def dead(self) -> bool:
        """Whether an engine was given up: only a new process helps."""
        return any(service.dead for service in self._services)

    @property
    def last_words(self) -> str:
        """Why the server ends, where an engine was given up."""
        return next(service.last_words for service in self._services if service.dead)

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return any(service.draining for service in self._services)

    @property
    def tickets(self) -> int:
        """Calls that are being answered."""
        return sum(service.admission.tickets for service in self._services)

    @property
    def progress(self) -> tuple[int, int]:
        """Programs compiled while warming up, of how many."""
        done, total = zip(*(service.progress for service in self._services), strict=True)
        return sum(done), sum(total)

    @property
    def how_far(self) -> str:
        """The same in words, with the seconds left if the other programs take as long as those so far."""
        done, total = self.progress
        said = f"{done} of {total} programs"
        if not done:
            return said
        return f"{said}, about {(total - done) * (time.monotonic() - self._began) / done:.0f} s left"

    @property
    def warm(self) -> bool:
        """Whether no program is being compiled for later requests."""
        done, total = self.progress
        return self.ready and done == total

    def check(self, tenant: str) -> None:
        """Whether any model would take a request of this key's, the least there is.

        Raises:
          ApiError: none would; as `Service.check`.
        """
        refusals: list[ApiError] = []
        for service in self._services:
            try:
                return service.check(tenant, Demand(1))
            except ApiError as error:
                refusals.append(error)
        raise refusals[0]

    async def drain(self) -> None:
        """Take nothing new; wait for what runs, as long as the settings say."""
        await asyncio.gather(*(service.drain() for service in self._services))
