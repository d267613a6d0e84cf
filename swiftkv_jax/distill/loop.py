"""The run around the steps: data in, metrics out, checkpoints, evaluation, signals, export."""

import dataclasses
import importlib.metadata
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from swiftkv_jax.analysis import flops
from swiftkv_jax.checkpoint.hf import local_folder
from swiftkv_jax.checkpoint.training import Checkpointer
from swiftkv_jax.common import processes
from swiftkv_jax.common.bucket import Home, Place
from swiftkv_jax.common.errors import UsageError, first_line
from swiftkv_jax.common.progress import Say, show, working
from swiftkv_jax.core import sharding, weights
from swiftkv_jax.distill import kernels, report, run_folder, start, trackers
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.answers import Ask, Compared, StudentAndTeacher, to_held_out
from swiftkv_jax.distill.config import Experiment, resolved
from swiftkv_jax.distill.data.loader import Batch, DataLoader, evaluation_batches, longest_piece
from swiftkv_jax.distill.progress import Progress
from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION
from swiftkv_jax.kernels.common.dispatch import UnsupportedError, preferred
from swiftkv_jax.text.tokenizer import load_tokenizer


class TrainingError(RuntimeError):
    """A run that cannot continue: the message is one line for the user; exit code 1."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a run; `answers` to held-out prompts. `signal` is the one that ended it early, or 0."""

    step: int
    evaluation: dict[str, float]
    export: Place | None
    signal: int = 0
    answers: Compared | None = None


@contextmanager
def opened(
    experiment: Experiment,
    out: Path | str | Home,
    resume: bool = False,
    say: Say = show,
    chosen: tuple[str | None, str] | None = None,
) -> Iterator["Run"]:
    """A run ready to `go` to its end, or to a signal, on its mesh; `out`, which may be in a bucket, gets
    config.json, metrics, checkpoints and the export.

    With several processes all of them call this; process 0 writes and speaks.

    Args:
      chosen: the result of `kernels.choose`, if the caller has asked JAX for its devices before.

    Raises:
      UsageError: bad input, found before the first step. An error in one process is raised in all.
      TrainingError: the loss is not finite, or a checkpoint could not be written.
    """
    chosen = chosen or kernels.choose(experiment)  # before JAX has its devices
    processes.check_same("the config", resolved(experiment))
    mesh = sharding.make_mesh(**dataclasses.asdict(experiment.mesh))
    with processes.together():
        home = out if isinstance(out, Home) else Home(out, writes=processes.is_first())
    with jax.set_mesh(mesh):
        run = Run(experiment, home, mesh, resume, say, chosen)
        try:
            yield run
        except UnsupportedError as error:
            raise UsageError(f"{error}; choose another by attention") from None
        finally:
            run.close()


class Run:
    """One run's state and helpers; `go` is the loop. `chosen`: the result of `kernels.choose`."""

    def __init__(
        self,
        experiment: Experiment,
        home: Home,
        mesh: jax.sharding.Mesh,
        resume: bool,
        say: Say,
        chosen: tuple[str | None, str],
    ):
        self.experiment, self.home, self.out, self.mesh = experiment, home, home.here, mesh
        attention, self.chosen_by = chosen
        self.first = processes.is_first()
        self.say = say if self.first else lambda _line: None
        with processes.together():  # on its own: the others must not read weights before they are refused
            if self.first:
                run_folder.check(home.place, experiment, resume)
                trackers.check(experiment.trackers)
        with processes.together():
            share = sharding.share_of_rows(mesh, jax.process_index())
            self.process = dict(zip(("process_index", "process_count"), share, strict=True))
            with working(self.say, f"reading the tokenizer of {experiment.tokenizer or experiment.model}"):
                # The folder is looked up once, so that all files are of one commit.
                folder = local_folder(experiment.model) if experiment.model else None
                self.tokenizer = load_tokenizer(experiment.tokenizer or folder or "")
            with working(self.say, f"reading the data in {', '.join(experiment.data.sources)}"):
                self.loader = DataLoader(experiment.data, self.tokenizer, **self.process)
                self.loader.check()
                self.held_out = {
                    length: evaluation_batches(
                        data, self.tokenizer, experiment.evaluation_batches or None, **self.process
                    )
                    for length, data in experiment.held_out().items()
                }
                total = experiment.steps or experiment.epochs * self.loader.steps_per_epoch()
            with working(self.say, "reading the weights" if folder else "making random weights"):
                loaded = start.load(experiment, folder, self.tokenizer, mesh)
        self.longest = {
            length: -processes.least(-longest_piece(batches)) for length, batches in self.held_out.items()
        }
        before = 0
        for length in sorted(self.held_out):
            if before and self.longest[length] <= before:  # the evaluation would repeat that of `before`
                del self.held_out[length]
                self.say(report.too_short(length, self.longest[length]))
            else:
                before = length
        steps.check(experiment, mesh)
        with working(self.say, "making the student"):
            student, trained, frozen = start.prepare(experiment, loaded)
            self.folder, self.recipe = folder, start.make_recipe(experiment, student, total)
            self.recipe = dataclasses.replace(self.recipe, attention=attention)
            self.abstract, abstract_frozen = steps.abstract_run(self.recipe, mesh, (trained, frozen))
            places = jax.tree.map(lambda leaf: leaf.sharding, (self.abstract, abstract_frozen))
            self.frozen = jax.device_put(frozen, places[1])
            self.state = jax.jit(partial(steps.init_state, self.recipe), out_shardings=places[0])(trained)
        self.step_fn = jax.jit(
            partial(steps.train_step, self.recipe), donate_argnums=1, out_shardings=(places[0], None)
        )
        self.evaluate_fn = jax.jit(partial(self.recipe.method.evaluate, self.recipe))
        self.batch_sharding = jax.sharding.NamedSharding(mesh, sharding.spec("B ."))
        with processes.together():
            if self.first:
                run_folder.make(self.out, experiment)
                home.send()
            self.checkpoints = Checkpointer(home.place / "checkpoints", keep=experiment.keep_checkpoints)
            settings = json.loads(resolved(experiment))
            wanted, folder_of_metrics = (experiment.trackers, self.out) if self.first else ((), None)
            started = trackers.start(wanted, experiment.name, self.out, settings)
            context = sum(experiment.data.lengths) // len(experiment.data.lengths)
            per_token, _ = self.recipe.method.flops(self.recipe, context)
            chip = flops.CHIPS.get(jax.devices()[0].device_kind)
            peak, every = chip.flops * mesh.size if chip else None, experiment.log_every
            self.progress = Progress(folder_of_metrics, total, every, per_token, peak, started, self.say)
        self.evaluated: tuple[int, dict[int, dict[str, np.ndarray]]] | None = None
        self.compiled: set[str] = set()
        self.to_fit = experiment.fits_start
        self.caught = 0
        self.several, self.stop = jax.process_count() > 1, processes.Stop()
        if resume:
            restored = self.checkpoints.restore(self.abstract, report=self.say)
            if restored is None:
                where = self.checkpoints.directory
                self.say(f"no checkpoint in {where} yet: starting from the beginning")
            else:
                done, self.state, meta = restored
                self.loader.restore(meta["data"])
                self.to_fit = False
                self.say(f"resumed from step {done}")

    def _first(self, program: str) -> bool:
        """Whether a program runs for the first time, and so compiles."""
        if program in self.compiled:
            return False
        self.compiled.add(program)
        return True

    def go(self, ask: Ask | None = None) -> Result:
        """Step until the end or a signal; every metric is read one step late, so the device never waits.

        Args:
          ask: what answers held-out prompts at the end; None: nothing.
        """
        e = self.experiment
        trained = weights.count(self.state.trainable)
        total = trained + weights.count(self.frozen.student)
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        self.say(
            f"{e.name}: {millions(total)} parameters, {millions(trained)} trained ({trained / total:.1%}); "
            f"{self.recipe.steps} steps of {e.data.batch_size} x {e.data.seq_len} tokens; "
            f"{jax.devices()[0].device_kind}, mesh {mesh}; {e.dtype}"
        )
        self.say(f"kernels: {self.kernels}")
        self.fit_start()
        with processes.together():  # none begins a step for which, or for the next, another has no batch
            if self.several:
                self.loader.look(min(self.stop.LAG, self.recipe.steps - int(self.state.step)))
        caught = [signal.SIGINT] if jax.distributed.is_initialized() else [signal.SIGINT, signal.SIGTERM]
        handlers = {s: signal.signal(s, self._catch) for s in caught}
        try:
            return self._loop(ask)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def fit_start(self) -> None:
        """Fit the student's rows by least squares, if the run asks for it and has no step or fit yet."""
        if not self.to_fit:
            return
        e, began = self.experiment, time.monotonic()
        loader = DataLoader(e.data, self.tokenizer, **self.process)
        try:
            count = math.ceil(e.start.init_tokens / (e.data.batch_size * e.data.seq_len))
            with working(self.say, f"fitting keys and values by least squares on {count} batches") as doing:
                batches = (self._place(next(loader)[0]) for _ in doing.counted(range(count)))
                trained = self.recipe.method.fit(self.recipe, self.state.trainable, self.frozen, batches)
            repeated = f" ({loader.different():,} different ones, repeated)" if loader.epoch else ""
        finally:
            loader.close()
        self.state, self.evaluated = dataclasses.replace(self.state, trainable=trained), None
        self.to_fit = False
        tokens = count * e.data.batch_size * e.data.seq_len
        took = f"on {tokens:,} tokens{repeated} in {time.monotonic() - began:.0f} s"
        self.say(f"keys and values fitted to the teacher's by least squares {took}")

    def _loop(self, ask: Ask | None) -> Result:
        e, done = self.experiment, int(self.state.step)
        evaluation, pending, began, first, ended_by = {}, None, time.monotonic(), done, 0
        try:
            while not (ended_by := self._signal(done)) and done < self.recipe.steps and not self._stops(done):
                batch, ids = next(self.loader)
                with working(self.say, "compiling the step") if self._first("step") else nullcontext():
                    self.state, metrics = self.step_fn(self.frozen, self.state, self._place(batch))
                done += 1
                before, pending = pending, (done, metrics, ids)
                began = self._report(before, began)
                due = done == self.recipe.steps or (e.checkpoint_every and done % e.checkpoint_every == 0)
                look = e.evaluate_every and done % e.evaluate_every == 0 and done < self.recipe.steps
                if due or look:
                    began, pending = self._report(pending, began), None
                if due:
                    self._save(done)
                if look:
                    evaluation = self.evaluate()
                    with self._noted():
                        self.progress.evaluation(done, evaluation)
                    began = time.monotonic()
        except Exception as error:
            lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))  # in a step that failed
            if lost or isinstance(error, TrainingError | jax.errors.JaxRuntimeError) or self.several:
                raise
            self.stop.fail(error)
        if processes.any_process(self.stop.failure is not None):
            if done > first:
                self._rescue(done, pending, began)
            with processes.together():
                if self.stop.failure is not None:
                    raise self.stop.failure
        self._report(pending, began)
        if ended_by:
            self._save(done)
        with working(self.say, "waiting for the checkpoint to be written"):
            self.checkpoints.wait()
        if skipped := self.loader.skipped:
            self.say(f"skipped {len(skipped)} rows of the data; one is {skipped[0]}")
        if ended_by:
            return Result(done, evaluation, None, ended_by)
        evaluation = self.evaluate()
        if evaluation:
            self.progress.evaluation(done, evaluation)
        self.export(self.out / "export")
        answers = self.answers(ask) if ask else None
        if self.first:
            model, device = self.recipe.student, f"{self.mesh.size} x {jax.devices()[0].device_kind}"
            outcome = report.Outcome(e, model, evaluation, self.longest, answers)
            report.write(self.out, outcome, device, self.folder)
        return Result(done, evaluation, self.home.place / "export", answers=answers)

    def _stops(self, done: int) -> bool:
        """Whether all of several processes stop after step `done`, as one of them cannot go on."""
        if not self.several:
            return False
        with self._noted():
            self.loader.look(min(1 + self.stop.LAG, self.recipe.steps - done))
        return self.stop.reached(done)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Context for work of this process alone; of several, an error waits until all have stopped."""
        try:
            yield
        except Exception as error:
            if not self.several:
                raise
            self.stop.fail(error)

    def _rescue(self, done: int, pending, began: float) -> None:
        """Save step `done` after an error that leaves the state sound: of data, of a disk, of a tracker."""
        try:
            if pending is not None:
                self._values(pending)
            self._save(done)
            self.checkpoints.wait()
            self.say(f"saved step {done}; --resume continues from it")
            self._report(pending, began)
        except Exception as failure:
            self.say(f"after the error below: {first_line(failure)}")

    def _signal(self, done: int) -> int:
        """The signal that ends the run after `done` steps, or 0.

        With several processes all end after the same step: JAX catches SIGTERM itself, tells the others, and
        chooses a step that none has passed (`multihost_utils.reached_preemption_sync_point`).
        """
        if not jax.distributed.is_initialized():
            return self.caught
        if not multihost_utils.reached_preemption_sync_point(done):
            return 0
        return self.caught or signal.SIGTERM

    def _report(self, pending, began: float) -> float:
        """Wait for a step's metrics, check and record them; returns the current time."""
        if pending is None:
            return began
        with self.progress.waiting(pending[0]):
            values = self._values(pending)
        now = time.monotonic()
        with self._noted():
            self.progress.record(pending[0], values, now - began)
        return now

    def _values(self, pending) -> dict[str, float]:
        """A step's metrics, once they are there."""
        step, metrics, ids = pending
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            names = sorted({name for row in ids for name in row})
            shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
            sizes = f"loss {values['loss']}, gradient norm {values['grad_norm']}"
            raise TrainingError(f"step {step}: {sizes}; samples of the batch: {shown}. Checkpoints are older")
        return values

    def evaluate(self) -> dict[str, float]:
        """Held-out cross-entropy and perplexity, and with a teacher also its own, the KL and the agreement.

        An exit head adds its KL to the teacher and its agreement with the student. With `eval_lengths`, all
        of these are given for each length that some document has, under names like "2048/kl".
        """
        named = bool(self.experiment.eval_lengths)
        return {
            f"{length}/{name}" if named else name: value
            for length, rows in self.row_sums().items()
            for name, value in summarise(rows, self.recipe.has_teacher).items()
        }

    def row_sums(self) -> dict[int, dict[str, np.ndarray]]:
        """`evaluate_batch`'s sums for every held-out row by context length, at the current step (kept until
        the next one)."""
        now = int(self.state.step)
        if self.evaluated is None or self.evaluated[0] != now:
            sums = {length: self.evaluate_rows(batches) for length, batches in self.held_out.items()}
            self.evaluated = now, sums
        return self.evaluated[1]

    def evaluate_rows(self, batches: list[Batch]) -> dict[str, np.ndarray]:
        """`evaluate_batch`'s sums for every row of these batches, at the current step."""
        compiling = "compiling and " if self._first("evaluate") else ""
        with working(self.say, f"{compiling}evaluating held-out rows") as doing:
            run = partial(self.evaluate_fn, self.frozen, self.state.trainable)
            sums = (run(self._place(batch)) for batch in doing.counted(batches))
            rows = [multihost_utils.process_allgather(each, tiled=True) for each in sums]
        return {name: np.concatenate([r[name] for r in rows]) for name in rows[0]}

    def answers(self, ask: Ask) -> Compared | None:
        """The student's answers to held-out prompts beside its teacher's, see `to_held_out`."""
        e, folder = self.experiment, self.folder
        if folder is None or e.evaluation is None or not self.recipe.has_teacher:
            return None
        params = steps.merge(self.state.trainable, self.frozen.student)
        models = StudentAndTeacher(self.recipe.student, params, folder, self.tokenizer)
        return to_held_out(ask, models, e.evaluation, e.answers, self.say)

    def _place(self, batch: Batch) -> Batch:
        put = partial(jax.make_array_from_process_local_data, self.batch_sharding)
        return jax.tree.map(put, batch)

    def _save(self, done: int) -> None:
        meta = {
            "data": global_state(self.loader.state()),
            "config": json.loads(resolved(self.experiment)),
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("jax", "flax", "optax", "orbax-checkpoint")
            },
        }
        self.checkpoints.save(done, self.state, meta)
        with self._noted():
            self.home.send()

    def export(self, folder: Path) -> None:
        """Save the student as it is now, in `export_dtype`, with its tokenizer."""
        params = steps.merge(self.state.trainable, self.frozen.student)
        dtype, tokenizer = self.experiment.export_dtype, self.tokenizer.folder
        with working(self.say, f"exporting to {folder}"):
            start.export(folder, self.recipe.student, params, dtype, self.folder, tokenizer)

    @property
    def kernels(self) -> str:
        """The attention kernel, and in brackets where the choice comes from."""
        e, config = self.experiment, self.recipe.student.config
        rows = e.data.batch_size // e.optimizer.accumulate
        kv_heads = config.num_kv_heads
        q, k, v = (
            jax.ShapeDtypeStruct((rows, e.data.seq_len, heads, width), jnp.dtype(e.dtype))
            for heads, width in (
                (config.num_heads, config.head_dim),
                (kv_heads, config.head_dim),
                (kv_heads, config.value_dim),
            )
        )
        segments = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)
        options = {"scale": config.head_dim**-0.5, "shards": sharding.SHARDS}
        kernel = self.recipe.attention or preferred(
            CAUSAL_ATTENTION, (q, k, v, segments, config.windows[0]), options
        )
        return f"causal_attention {kernel} ({self.chosen_by})"

    def _catch(self, number: int, _frame) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = number
        name = signal.Signals(number).name
        self.say(f"\n{name}: finishing this step, saving, then stopping (again: stop at once)")
        if jax.distributed.is_initialized():  # JAX tells the other processes of SIGTERM only
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Close all parts, even if one fails; a checkpoint that was not saved is reported before all else."""
        with ExitStack() as stack:
            stack.callback(self.home.send)
            for part in (self.checkpoints, self.progress, self.loader):  # closed from the last
                stack.callback(part.close)


def millions(count: int) -> str:
    """A number of parameters as text: 402.7 M; below a million, 123 K."""
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count / 1e3:,.0f} K"


def global_state(state: dict) -> dict:
    """The data state of all processes as one: each lane's place, gathered from the process that owns it."""
    if jax.process_count() == 1:
        return state
    mine = np.array([[int(lane), *place] for lane, place in state["lanes"].items()], np.int64)
    every = multihost_utils.process_allgather(mine).reshape(-1, 3)
    return state | {"lanes": {str(lane): [int(cursor), int(offset)] for lane, cursor, offset in every}}


def summarise(rows: dict[str, np.ndarray], has_teacher: bool) -> dict[str, float]:
    """Means over all tokens of the per-row sums from `Run.row_sums`."""
    total = {name: float(np.sum(value, dtype=np.float64)) for name, value in rows.items()}
    tokens = max(total.pop("tokens"), 1.0)
    mean = {name: value / tokens for name, value in total.items()}
    out = {"cross_entropy": mean["student"], "perplexity": math.exp(min(mean["student"], 700))}
    if not has_teacher:
        return out
    out["teacher_cross_entropy"] = mean["teacher"]
    out["teacher_perplexity"] = math.exp(min(mean["teacher"], 700))
    names = {"kl": "kl", "agree": "agreement", "auxiliary": "auxiliary_cross_entropy"}
    names |= {"exit_kl": "exit_kl", "exit_agree": "exit_agreement"}
    return out | {name: mean[sums] for sums, name in names.items() if sums in mean}
