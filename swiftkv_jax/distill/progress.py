"""What a run says while it goes: one progress line, a JSONL file of metrics, TensorBoard if asked."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from swiftkv_jax.errors import UsageError

T = TypeVar("T")
_SILENT = 10.0  # seconds


class Progress:
    """Writes metrics of each step to `metrics.jsonl` and one line to the terminal now and then.

    A line that is not a terminal's is printed every `log_every` steps; a terminal's is rewritten in place.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        log_every: int,
        flops_per_token: float,
        peak: float | None,
        tensorboard: bool,
    ):
        self.steps, self.log_every = steps, log_every
        self.flops_per_token, self.peak = flops_per_token, peak
        self.file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self.board = _tensorboard(folder) if tensorboard else None
        self.began, self.first = time.monotonic(), None

    def record(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """One finished step that took `seconds` (host clock, waiting included)."""
        self.first = step if self.first is None else self.first
        rate = metrics["tokens"] / seconds
        row = {"step": step, **metrics, "step_seconds": seconds, "tokens_per_second": rate}
        if self.peak:
            row["mfu"] = rate * self.flops_per_token / self.peak
        self._write(row)
        if step % self.log_every == 0 or step == self.steps:
            self.say(self._line(step, row))

    def _line(self, step: int, row: dict) -> str:
        assert self.first is not None  # `record` has set it
        done = max(1, step - self.first + 1)
        left = (time.monotonic() - self.began) / done * (self.steps - step)
        parts = [f"step {step}/{self.steps}", f"loss {row['loss']:.4f}", f"lr {row['lr']:.2e}"]
        parts += [f"grad {row['grad_norm']:.2f}", f"{row['tokens_per_second']:,.0f} tok/s"]
        parts += [f"mfu {row['mfu']:.1%}"] if "mfu" in row else []
        return "  ".join([*parts, f"eta {int(left) // 60}:{int(left) % 60:02d}"])

    def evaluation(self, step: int, result: dict[str, float]) -> None:
        """Record a judgement of held-out data; a line for each context length ("2048/kl")."""
        self._write({"step": step, **{f"eval/{name}": value for name, value in result.items()}})
        lines: dict[str, list[str]] = {}
        for name, value in result.items():
            length, _, figure = name.rpartition("/")
            lines.setdefault(length, []).append(f"{figure} {value:.4f}")
        for length, figures in lines.items():
            at = f"at {length:>5s} tokens  " if length else ""
            self.say(f"eval {step}  {at}" + "  ".join(figures), keep=True)

    def counted(self, what: str, items: Sequence[T]) -> Iterator[T]:
        """The items, one by one; every few seconds a line says how many of them are done."""
        told = time.monotonic()
        for number, item in enumerate(items):
            if time.monotonic() - told > _SILENT:
                told = time.monotonic()
                self.say(f"{what} {number} of {len(items)}")
            yield item

    def say(self, line: str, keep: bool = False) -> None:
        """Print a line; on a terminal the next one replaces it unless `keep`."""
        live = sys.stdout.isatty() and not keep
        print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, end="" if live else "\n", flush=True)

    def _write(self, row: dict) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in row.items():
                if name != "step":
                    self.board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


class Silence:
    """Progress of the processes that are not the first: nothing."""

    def record(self, step: int, metrics: dict[str, float], seconds: float) -> None: ...

    def evaluation(self, step: int, result: dict[str, float]) -> None: ...

    def counted(self, what: str, items: Sequence[T]) -> Iterator[T]:
        return iter(items)

    def say(self, line: str, keep: bool = False) -> None: ...

    def close(self) -> None: ...


def _tensorboard(folder: Path):
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UsageError(
            "tensorboard=True needs tensorboardX: pip install 'swiftkv-jax[tensorboard]'"
        ) from None
    return SummaryWriter(str(folder / "tensorboard"))
