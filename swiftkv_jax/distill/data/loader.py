"""The data loader: batches in an order determined by the seed alone, resumable after any of them."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.distill.data.packing import Batch, Place, Sample, assemble, fill_row
from swiftkv_jax.distill.data.samples import DataConfig, Samples
from swiftkv_jax.text.tokenizer import Tokenizer

_TRIED, _TRIED_TOKENS = 2000, 2**20  # samples that `check` looks at, at most, and tokens
# Second word of the random key for other uses; for an epoch's order it is the epoch's number.
_FUSE_STREAM, _PASS_STREAM = 2**64 - 1, 2**64 - 2


class DataLoader:
    """An endless iterator of `(Batch, ids)`: this process's rows of each batch, and the samples in each row.

    The batch has `batch_size` lanes. The samples of all epochs form one sequence. An epoch has every sample
    once, or as often as `weights` say (`members`); its order is a pure function of (seed, epoch). Lane b
    packs numbers b, b + batch_size, ... of the sequence and yields one row a step. So the batches do not
    depend on the number of processes, and a process tokenises only what its lanes pack. `ids[row][segment -
    1]` is the id of a segment's sample.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        process_index: int = 0,
        process_count: int = 1,
        prefetch: int = 2,
    ):
        """A thread makes `prefetch` batches ahead; `state` counts only those handed out."""
        if config.batch_size % process_count:
            size = config.batch_size
            raise UsageError(f"data.batch_size {size} is not a multiple of the {process_count} processes")
        share = config.batch_size // process_count
        self.config, self.prefetch = config, prefetch
        self.lanes = range(process_index * share, (process_index + 1) * share)
        self.samples = Samples(config, tokenizer)
        self._counts = counts(self.samples.sizes, config.weights) if config.weights else ()
        self._epoch_size = sum(self._counts) or len(self.samples)
        self._orders: dict[int, np.ndarray] = {}
        self._ahead: collections.deque[Future] = collections.deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._step, self._places = 0, {lane: Place() for lane in self.lanes}
        self._front = (self._step, self._places)

    def __iter__(self) -> "DataLoader":
        return self

    def __next__(self) -> tuple[Batch, list[list[str]]]:
        while len(self._ahead) <= self.prefetch:
            self._ahead.append(self._worker.submit(self._produce))
        batch, ids, (self._step, self._places) = self._ahead.popleft().result()
        return batch, ids

    def look(self, count: int) -> None:
        """Wait until the next `count` batches are made. Raises what making one of them raises."""
        while len(self._ahead) < count + self.prefetch:
            self._ahead.append(self._worker.submit(self._produce))
        for future in itertools.islice(self._ahead, count):
            future.result()

    @property
    def epoch(self) -> int:
        """Passes over the data that all lanes of this process have finished."""
        slowest = min(self._number(lane, place.cursor) for lane, place in self._places.items())
        return slowest // self._epoch_size

    def steps_per_epoch(self) -> int:
        """Steps of one pass; with many samples, estimated from the lengths of 10,000 evenly spaced ones."""

        def measure() -> int:
            every = self._members(0) if self._counts else range(len(self.samples))
            indices = every[:: -(-len(every) // 10_000)]
            rows = len(_pack_once(self.config, self.samples, indices))
            return math.ceil(rows * len(every) / len(indices) / self.config.batch_size)

        return self._worker.submit(measure).result()

    def check(self) -> None:
        """Tokenise the samples that this process meets first, up to 2,000; they stay cached."""

        def check() -> None:
            broken, tokens = [], 0
            for number in range(min(_TRIED, self._epoch_size)):
                if number % self.config.batch_size not in self.lanes or tokens > _TRIED_TOKENS:
                    continue
                try:
                    tokens += len(self.samples[self._index(number)])
                except UsageError as error:
                    broken.append(error)
            if broken:
                more = f" ({len(broken)} rows of the first that are met are broken)" if broken[1:] else ""
                raise UsageError(f"{broken[0]}{more}")

        self._worker.submit(check).result()

    def different(self) -> int:
        """Tokens of all samples, each counted once."""
        return self._worker.submit(lambda: sum(map(len, self.samples))).result()

    @property
    def skipped(self) -> list[str]:
        """What was wrong with each sample that this process has met and skipped."""
        return list(self.samples.skipped.values())

    def state(self) -> dict:
        """All that determines the next batch, as JSON: the place of this process's lanes, and the config."""
        lanes = {str(lane): [place.cursor, place.offset] for lane, place in self._places.items()}
        return {"step": self._step, "lanes": lanes, "config": self._identity()}

    def restore(self, state: dict) -> None:
        """Continue exactly where `state` was taken, with any number of processes.

        A state of several processes must have the lanes of all of them.
        """
        try:
            step, saved, lanes = int(state["step"]), dict(state["config"]), dict(state["lanes"])
            places = {int(lane): Place(int(cursor), int(offset)) for lane, (cursor, offset) in lanes.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is not a data loader's state: {error!r}") from error
        mine = self._identity()
        saved.setdefault("ids", mine["ids"])  # older states have a hash of the tokenizer's file
        # A field that is off counts as absent: the state may be older than the field.
        differ = [k for k in mine if (saved.get(k) or None) != (mine[k] or None)]
        changed = [f"{k} {saved.get(k)!r} -> {mine[k]!r}" for k in differ]
        if changed:
            raise UsageError(f"the data differs from that of the saved state: {', '.join(changed)}")
        missing = [lane for lane in self.lanes if lane not in places]
        if missing:
            raise UsageError(f"the saved data state lacks lanes {missing}: merge the states of all processes")
        for future in self._ahead:
            future.cancel()
        wait(self._ahead)
        self._ahead.clear()
        self._step, self._places = step, {lane: places[lane] for lane in self.lanes}
        self._front = (self._step, self._places)

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _identity(self) -> dict:
        """All that determines the order and the content of batches."""
        fields = dataclasses.asdict(self.config)
        del fields["sources"], fields["skip_bad_lines"]
        fields = {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}  # as in JSON
        fields["pieces_begin_with_bos"] = self.samples.bos is not None
        return fields | {"documents": self.samples.documents.digest, "ids": self._ids}

    @functools.cached_property
    def _ids(self) -> str:
        return self._worker.submit(self.samples.digest).result()

    def _produce(self) -> tuple[Batch, list[list[str]], tuple[int, dict[int, Place]]]:
        """The next batch and the state after it; runs on the worker, which alone touches `_front`."""
        step, places = self._front
        rows, after, fused = [], {}, []
        for lane in self.lanes:
            pieces, after[lane] = _next_row(
                self.config,
                step + lane,
                lambda cursor, lane=lane: self.samples[self._index(self._number(lane, cursor))],
                places[lane],
            )
            rows.append(pieces)
            bits = _philox(self.config.seed, _FUSE_STREAM, lane, step).random_raw(1)
            fused.append(int(bits[0]) < self.config.fuse_positions * 2**64)
        self._front = (step + 1, after)
        return assemble(rows, fused, self.config.seq_len), [[p.id for p in row] for row in rows], self._front

    def _number(self, lane: int, cursor: int) -> int:
        """Number, in the sequence of all epochs, of the `cursor`-th sample that a lane packs."""
        return lane + cursor * self.config.batch_size

    def _index(self, number: int) -> int:
        """The sample with that number."""
        epoch, place = divmod(number, self._epoch_size)
        if epoch not in self._orders:
            order = _shuffled(self._epoch_size, self.config.seed, epoch)
            self._orders[epoch] = self._members(epoch)[order] if self._counts else order
            while len(self._orders) > 2:  # lanes are at most about an epoch apart
                del self._orders[next(iter(self._orders))]
        return int(self._orders[epoch][place])

    def _members(self, epoch: int) -> np.ndarray:
        """The samples of an epoch under weights, source by source."""
        sizes, seed = self.samples.sizes, self.config.seed

        def order(source: int, number: int) -> np.ndarray:
            return _shuffled(sizes[source], seed, _PASS_STREAM, source, number)

        return members(sizes, self._counts, epoch, order)


def counts(sizes: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each source in an epoch: its size times its weight, rounded, but at least one."""
    empty = [i for i, size in enumerate(sizes) if not size]
    if empty:
        number = empty[0] + 1
        raise UsageError(f"data.weights: source number {number} has no samples left; raise data.limit")
    return tuple(max(1, round(size * weight)) for size, weight in zip(sizes, weights, strict=True))


def members(
    sizes: Sequence[int], counts: Sequence[int], epoch: int, order: Callable[[int, int], np.ndarray]
) -> np.ndarray:
    """The samples of an epoch, source by source; samples are numbered through all sources.

    A source's samples are taken in passes, each with its own order, and an epoch continues where the last one
    stopped. So after any number of epochs, how often two samples of a source were taken differs by at most
    one.

    Args:
      order: (source, number of the pass) -> the order [size] of that pass.
    """
    out, start = [], 0
    for source, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        places = np.arange(epoch * count, (epoch + 1) * count)
        for number in range(int(places[0]) // size, int(places[-1]) // size + 1):
            out.append(start + order(source, number)[places[places // size == number] % size])
        start += size
    return np.concatenate(out)


def _shuffled(size: int, seed: int, stream: int, *place: int) -> np.ndarray:
    """A random order. It sorts raw Philox output, which numpy promises never to change."""
    return np.argsort(_philox(seed, stream, *place).random_raw(size), kind="stable")


def _philox(seed: int, stream: int, *place: int) -> np.random.Philox:
    """Random bits that are a pure function of the arguments, each below 2^64."""
    counter = np.zeros(4, np.uint64)
    counter[1 : 1 + len(place)] = place
    return np.random.Philox(key=np.array([seed, stream], np.uint64), counter=counter)


def evaluation_batches(
    config: DataConfig,
    tokenizer: Tokenizer,
    limit: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> list[Batch]:
    """Every sample of the config's split once, in order, as the same batches every time.

    Args:
      limit: most batches to return. The last one is filled up with empty rows.
      process_index, process_count: as in `DataLoader`: this process's rows of each batch.
    """
    if config.batch_size % process_count:
        raise UsageError(f"batch_size {config.batch_size} is not a multiple of the {process_count} processes")
    samples, size = Samples(config, tokenizer), config.batch_size
    rows = _pack_once(config, samples, range(len(samples)), None if limit is None else limit * size)
    rows += [[] for _ in range(-len(rows) % size)]
    share = size // process_count
    starts = range(process_index * share, len(rows), size)
    return [assemble(rows[i : i + share], [False] * share, config.seq_len) for i in starts]


def longest_piece(batches: Sequence[Batch]) -> int:
    """Tokens of the longest piece in these rows of an evaluation."""
    return 1 + max(int(batch.positions.max()) for batch in batches)


def _next_row(config: DataConfig, number: int, sample_at, place: Place) -> tuple[list[Sample], Place]:
    """`fill_row` for row number `number` of a config, with the piece length that is that row's turn."""
    longest, anywhere = config.lengths[number % len(config.lengths)], config.long_documents == "fill"
    return fill_row(
        sample_at, place, config.seq_len, pack=config.pack, cut_anywhere=anywhere, longest=longest
    )


def _pack_once(
    config: DataConfig, samples: Samples, indices: Sequence[int] | np.ndarray, limit: int | None = None
) -> list[list[Sample]]:
    """The rows that some samples make in this order, at most `limit`."""
    rows, place = [], Place()
    while place.cursor < len(indices) and (limit is None or len(rows) < limit):
        pieces, place = _next_row(
            config,
            len(rows),
            lambda cursor: samples[int(indices[cursor])] if cursor < len(indices) else None,
            place,
        )
        if pieces:
            rows.append(pieces)
    return rows
