"""Progress of a run: lines on the terminal, a JSONL file of metrics, and optional trackers."""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from swiftkv_jax.common.progress import LATER, Say, pause, show, ticking
from swiftkv_jax.distill.trackers import Tracker


class Progress:
    """Writes metrics of each step to `metrics.jsonl` and one line to the terminal now and then.

    A line is printed every `log_every` steps, and sooner if steps are slow. On a terminal the next line
    replaces it, and the seconds of a long step are counted. A `say` other than `show` receives the lines.
    Without a folder, as in the processes other than the first, nothing is written.
    """

    def __init__(
        self,
        folder: Path | None,
        steps: int,
        log_every: int,
        flops_per_token: float,
        peak: float | None,
        trackers: Sequence[Tracker] = (),
        say: Say = show,
    ):
        self.steps, self.log_every, self._tell, self.trackers = steps, log_every, say, trackers
        self.flops_per_token, self.peak = flops_per_token, peak
        path = Path(os.devnull) if folder is None else folder / "metrics.jsonl"
        with path.open("ab+") as file:  # a kill may have cut the last line short
            if size := file.tell():
                file.seek(size - 1)
                file.write(b"" if file.read() == b"\n" else b"\n")
        self.file = path.open("a", encoding="utf-8")
        self.began = self.said = time.monotonic()
        self.first: tuple[int, float] | None = None  # the first step, and when it ended

    def record(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """One finished step that took `seconds` (host clock, waiting included)."""
        rate = metrics["tokens"] / seconds
        row = {"step": step, **metrics, "step_seconds": seconds, "tokens_per_second": rate}
        if self.peak:
            row["mfu"] = rate * self.flops_per_token / self.peak
        self._write(row)
        now = time.monotonic()
        first, since = self.first = self.first or (step, now)
        slow = now - self.said >= pause(self._tell, now - self.began)
        if not (slow or step % self.log_every == 0 or step == self.steps):
            return
        self.said = now
        pace = (now - since) / (step - first) if step > first else seconds
        left = pace * (self.steps - step)
        parts = [f"step {step}/{self.steps}", f"loss {row['loss']:.4f}", f"lr {row['lr']:.2e}"]
        parts += [f"grad {row['grad_norm']:.2f}", f"{row['tokens_per_second']:,.0f} tok/s"]
        parts += [f"mfu {row['mfu']:.1%}"] if "mfu" in row else []
        self.say("  ".join([*parts, f"eta {int(left) // 60}:{int(left) % 60:02d}"]))

    def waiting(self, step: int) -> contextlib.AbstractContextManager:
        """Context for the wait for a step: its seconds are told from the tenth on."""
        words = f"step {step}/{self.steps}"
        return ticking(
            lambda seconds: self.say(f"{words}: {seconds:.0f} s so far"),
            lambda seconds: max(LATER - seconds, pause(self._tell, time.monotonic() - self.began)),
        )

    def evaluation(self, step: int, result: dict[str, float]) -> None:
        """Record an evaluation on held-out data; a line for each context length ("2048/kl")."""
        self._write({"step": step, **{f"eval/{name}": value for name, value in result.items()}})
        lines: dict[str, list[str]] = {}
        for name, value in result.items():
            length, _, figure = name.rpartition("/")
            lines.setdefault(length, []).append(f"{figure} {value:.4f}")
        for length, figures in lines.items():
            prefix = f"at {length:>5s} tokens  " if length else ""
            self.say(f"eval {step}  {prefix}" + "  ".join(figures), keep=True)

    def say(self, line: str, keep: bool = False) -> None:
        """Print a line; on a terminal the next one replaces it unless `keep`."""
        if self._tell is not show:
            return self._tell(line)
        show(line, passing=not keep)

    def _write(self, row: dict) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        for tracker in self.trackers:
            tracker.log({name: value for name, value in row.items() if name != "step"}, row["step"])

    def close(self) -> None:
        """Close the file and end all trackers, even if one of them fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.file.close)
            for tracker in self.trackers:
                stack.callback(tracker.finish)
