"""Plan, run, record: sequences come and go while the batch keeps running."""

import dataclasses
import time

from jax.sharding import Mesh

from swiftkv_jax.engine.request import Request, RequestOutput
from swiftkv_jax.engine.runner import Runner
from swiftkv_jax.engine.scheduler import Scheduler, power_of_two
from swiftkv_jax.engine.sequence import Sequence
from swiftkv_jax.model import Transformer
from swiftkv_jax.shapes import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine runs. None of it changes a request's tokens.

    Attributes:
      max_model_len: most tokens of prompt and completion together.
      max_num_seqs: sequences that run at once. max_num_batched_tokens: prompt tokens of one launch.
      steps_per_launch: tokens a lane decodes before the host looks at stop strings and waiting requests.
    """

    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    steps_per_launch: int = 16


@dataclasses.dataclass
class Stats:
    """What an engine did. Seconds are wall time in launches; compilation of new shapes is in them."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    cache_bytes: int = 0
    cache_bytes_per_token: int = 0

    def as_dict(self) -> dict[str, int | float]:
        """All fields, seconds in all, and tokens per second: of prompts while read, of output in all."""
        seconds = self.prompt_seconds + self.decode_seconds
        return dataclasses.asdict(self) | {
            "seconds": seconds,
            "prompt_tokens_per_s": self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0,
            "output_tokens_per_s": self.output_tokens / seconds if seconds else 0.0,
        }


class Engine:
    """Runs a list of requests to their ends, as many at once as there are lanes.

    Every `step` is one launch: prompt chunks if any prompt is waiting in a lane, decoding otherwise.
    """

    def __init__(
        self,
        model: Transformer,
        params: PyTree,
        mesh: Mesh | None,
        tokenizer,
        requests: list[Request],
        settings: Settings,
    ):
        total = sum(request.params.n for request in requests)
        lanes = min(power_of_two(total), settings.max_num_seqs)
        limit = settings.max_model_len
        self.runner = Runner(model, params, mesh, requests, lanes, limit, settings.steps_per_launch)
        self.scheduler = Scheduler(lanes, settings.max_num_batched_tokens)
        cache = self.runner.cache
        self.stats = Stats(
            cache_bytes=cache.k.nbytes + cache.v.nbytes, cache_bytes_per_token=cache.bytes_per_token
        )
        arrival = time.perf_counter()
        self._groups = [
            [Sequence(request, child, tokenizer, arrival) for child in range(request.params.n)]
            for request in requests
        ]
        for group in self._groups:
            for sequence in group:
                self.scheduler.add(sequence)
        self._open = dict(enumerate(self._groups))

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def step(self) -> list[tuple[int, RequestOutput]]:
        """One launch; the requests that it finished, with their numbers."""
        start = time.perf_counter()
        for sequence in self.scheduler.admit():
            sequence.scheduled = start
            self.runner.seat(sequence)
        work, size = self.scheduler.plan()
        if work:
            self._read(work, size)
            self.stats.prompt_seconds += time.perf_counter() - start
        else:
            self._decode()
            self.stats.decode_seconds += time.perf_counter() - start
        for sequence in [s for s in self.scheduler.running.values() if s.finish_reason]:
            self.scheduler.release(sequence)
        return self._collect()

    def _read(self, work, size: int) -> None:
        completing = [item.sequence for item in work if item.completes]
        choices = self.runner.read(work, size)
        now = time.perf_counter()
        for item in work:
            item.sequence.cached += item.count
        for sequence, choice in zip(completing, choices, strict=True):
            sequence.append(choice, now)
        self.stats.prompt_tokens += sum(item.count for item in work)
        self.stats.output_tokens += len(completing)

    def _decode(self) -> None:
        running = [sequence for _, sequence in sorted(self.scheduler.running.items())]
        launched = self.runner.decode(running)
        now = time.perf_counter()
        for sequence, choices in zip(running, launched, strict=True):
            for choice in choices:  # those behind a stop string that only the host can see are dropped
                sequence.append(choice, now)
                sequence.cached += 1
                self.stats.output_tokens += 1
                if sequence.finish_reason:
                    break

    def _collect(self) -> list[tuple[int, RequestOutput]]:
        """Requests all of whose completions have ended since the last look."""
        done = [i for i, group in self._open.items() if all(s.finish_reason for s in group)]
        return [(i, _output(i, self._open.pop(i))) for i in done]


def _output(number: int, group: list[Sequence]) -> RequestOutput:
    request = group[0].request
    return RequestOutput(
        request_id=str(number),
        prompt=request.prompt,
        prompt_token_ids=list(request.token_ids),
        outputs=[sequence.completion() for sequence in group],
        metrics=group[0].metrics,
    )
