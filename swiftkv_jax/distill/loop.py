"""The run around the steps: data in, metrics out, checkpoints, evaluation, signals, export."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from swiftkv_jax import params as weights
from swiftkv_jax import sharding
from swiftkv_jax.analysis import flops
from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.checkpoint.training import Checkpointer
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import Experiment, resolved
from swiftkv_jax.distill.data import Batch, DataLoader, evaluation_batches
from swiftkv_jax.distill.progress import Progress, Silence
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model import Transformer
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.shapes import PyTree
from swiftkv_jax.tokenizer import load_tokenizer


class TrainingError(RuntimeError):
    """A run that cannot go on: the message is one line for the user; exit code 1."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run left behind. `signal` is the one that ended it early, or 0."""

    step: int
    evaluation: dict[str, float]
    export: Path | None
    signal: int = 0


def load_teacher(experiment: Experiment, mesh) -> tuple[Transformer, PyTree]:
    """The model that is trained or distilled: from a checkpoint, or random under `architecture`."""
    if experiment.model:
        return from_pretrained(experiment.model, dtype=experiment.dtype, mesh=mesh)
    config = experiment.architecture
    assert config is not None  # an Experiment without a model has an architecture
    model = Transformer(config, KVPlan.standard(config.num_layers), experiment.dtype)
    tree = weights.abstract(config, model.plan, jnp.float32, mesh)
    make = jax.jit(
        lambda key: weights.init(config, model.plan, key),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, tree),
    )
    return model, make(jax.random.key(experiment.seed))


def train(
    experiment: Experiment, out: Path, resume: bool = False, say: Callable[[str], None] = print
) -> Result:
    """Run an experiment to its end, or to a signal; `out` gets config.json, metrics, checkpoints and the
    export.

    Raises:
      UsageError: bad input, found before the first step.
      TrainingError: the loss is not finite, or a checkpoint could not be written.
    """
    mesh = sharding.make_mesh(**dataclasses.asdict(experiment.mesh))
    with jax.set_mesh(mesh):
        run = Run(experiment, out, mesh, resume, say)
        try:
            return run.go()
        finally:
            run.close()


class Run:
    """One run's moving parts; `go` is the loop."""

    def __init__(self, experiment: Experiment, out: Path, mesh, resume: bool, say: Callable[[str], None]):
        self.experiment, self.out, self.mesh, self.say = experiment, out, mesh, say
        self.tokenizer = load_tokenizer(experiment.tokenizer or experiment.model)
        teacher, params = load_teacher(experiment, mesh)
        if self.tokenizer.vocab_size > teacher.config.vocab_size:
            raise UsageError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, "
                f"the model only {teacher.config.vocab_size}"
            )
        rows = experiment.data.batch_size // experiment.optimizer.accumulate
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        if rows % shards:
            raise UsageError(
                f"each micro-batch has {rows} rows, which the mesh's {shards} data shards do not divide"
            )
        plan = experiment.plan.build(teacher.config.num_layers)
        self.process = {"process_index": jax.process_index(), "process_count": jax.process_count()}
        self.loader = DataLoader(experiment.data, self.tokenizer, **self.process)
        total = experiment.steps or experiment.epochs * self.loader.steps_per_epoch()
        student, trained, frozen = steps.prepare(
            teacher,
            params,
            plan,
            experiment.plan.init,
            experiment.trainable,
            exit_head=experiment.loss.exit_weight > 0,
        )
        self.recipe = steps.make_recipe(experiment, student, total)
        self.abstract, abstract_frozen = steps.abstract_run(self.recipe, mesh)
        places = jax.tree.map(lambda leaf: leaf.sharding, (self.abstract, abstract_frozen))
        self.frozen = jax.device_put(frozen, places[1])
        self.state = jax.jit(
            partial(steps.init_state, self.recipe, seed=experiment.seed), out_shardings=places[0]
        )(trained)
        self.step_fn = jax.jit(
            partial(steps.train_step, self.recipe), donate_argnums=1, out_shardings=(places[0], None)
        )
        self.evaluate_fn = jax.jit(partial(steps.evaluate_batch, self.recipe))
        self.batch_sharding = jax.sharding.NamedSharding(mesh, sharding.spec("B ."))
        self.first = jax.process_index() == 0
        _prepare_folder(out, experiment, resume)
        self.checkpoints = Checkpointer(out / "checkpoints", keep=experiment.keep_checkpoints)
        self.progress = self._progress() if self.first else Silence()
        self.held_out, self.evaluated = None, None
        self.caught = 0
        if resume:
            self._restore()

    def _progress(self) -> Progress:
        e = self.experiment
        per_token = steps.flops_per_token(self.recipe, e.data.seq_len)
        peak = flops.PEAK_FLOPS.get(jax.devices()[0].device_kind)
        return Progress(
            self.out, self.recipe.steps, e.log_every, per_token, peak and peak * self.mesh.size, e.tensorboard
        )

    def go(self) -> Result:
        """Step until the end or a signal; every metric is read one step late, so the device never waits."""
        self._describe()
        handlers = {s: signal.signal(s, self._catch) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._loop()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _loop(self) -> Result:
        e, done = self.experiment, int(self.state.step)
        evaluation, pending, began = {}, None, time.monotonic()
        while done < self.recipe.steps and not self.caught:
            batch, ids = next(self.loader)
            self.state, metrics = self.step_fn(self.frozen, self.state, self._place(batch))
            done += 1
            began = self._report(pending, began)
            pending = (done, metrics, ids)
            due = done == self.recipe.steps or (e.checkpoint_every and done % e.checkpoint_every == 0)
            look = e.evaluate_every and done % e.evaluate_every == 0 and done < self.recipe.steps
            if due or look:
                began, pending = self._report(pending, began), None
            if due:
                self._save(done)
            if look:
                evaluation = self.evaluate()
                self.progress.evaluation(done, evaluation)
                began = time.monotonic()
        self._report(pending, began)
        if self.caught:
            self._save(done)
            self.checkpoints.wait()
            return Result(done, evaluation, None, self.caught)
        self.checkpoints.wait()
        evaluation = self.evaluate()
        if evaluation:
            self.progress.evaluation(done, evaluation)
        return Result(done, evaluation, self._export())

    def _report(self, pending, began: float) -> float:
        """Wait for a step's metrics, check and record them; the time it is now."""
        if pending is None:
            return began
        step, metrics, ids = pending
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            names = sorted({name for row in ids for name in row})
            shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
            raise TrainingError(
                f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}; "
                f"samples of the batch: {shown}. "
                "The last checkpoint is good"
            )
        now = time.monotonic()
        self.progress.record(step, values, now - began)
        return now

    def evaluate(self) -> dict[str, float]:
        """Held-out cross-entropy and perplexity, and, with a teacher, its own, the KL and the agreement.

        Of an exit head, the KL to the teacher and the agreement with the student.
        """
        return summarise(self.row_sums(), self.recipe.has_teacher) if self.experiment.evaluation else {}

    def row_sums(self) -> dict[str, np.ndarray]:
        """`evaluate_batch`'s sums for every held-out row, at the current step (kept until the next one)."""
        e, now = self.experiment, int(self.state.step)
        if self.held_out is None:
            assert e.evaluation is not None  # `evaluate` asks only when there is held-out data
            limit = e.evaluation_batches or None
            self.held_out = evaluation_batches(e.evaluation, self.tokenizer, limit, **self.process)
        if self.evaluated is None or self.evaluated[0] != now:
            sums = [
                self.evaluate_fn(self.frozen, self.state.trainable, self._place(b)) for b in self.held_out
            ]
            rows = [multihost_utils.process_allgather(s, tiled=True) for s in sums]
            self.evaluated = now, {name: np.concatenate([r[name] for r in rows]) for name in rows[0]}
        return self.evaluated[1]

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

    def _restore(self) -> None:
        found = self.checkpoints.restore(self.abstract, report=self.say)
        if found is None:
            self.say(f"no checkpoint in {self.out / 'checkpoints'} yet: starting from the beginning")
            return
        done, self.state, meta = found
        self.loader.restore(meta["data"])
        self.say(f"resumed from step {done}")

    def _export(self) -> Path | None:
        params = steps.merge(self.state.trainable, {n: p for n, p in self.frozen.items() if n != "teacher"})
        folder = self.out / "export"
        dtype = jnp.dtype(self.experiment.export_dtype)
        student = self.recipe.student
        config = dataclasses.replace(student.config, dtype=self.experiment.export_dtype)
        student = Transformer(config, student.plan, self.experiment.export_dtype)
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        save_pretrained(folder, student, params, source=self.experiment.tokenizer or self.experiment.model)
        return folder

    def _describe(self) -> None:
        e, model = self.experiment, self.recipe.student
        trained = weights.count(self.state.trainable)
        total = weights.count(weights.weights(model.config, model.plan))
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        self.say(
            f"{e.name}: {total / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M trained "
            f"({trained / total:.1%}); "
            f"{self.recipe.steps} steps of {e.data.batch_size} x {e.data.seq_len} tokens; "
            f"{jax.devices()[0].device_kind}, mesh {mesh}; {e.dtype}"
        )

    def _catch(self, number: int, _frame) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = number
        self.say(
            f"\n{signal.Signals(number).name}: finishing this step, saving, then leaving "
            "(again: leave at once)"
        )

    def close(self) -> None:
        self.loader.close()
        self.progress.close()
        self.checkpoints.close()


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
    teacher = {
        "teacher_cross_entropy": mean["teacher"],
        "teacher_perplexity": math.exp(min(mean["teacher"], 700)),
    }
    out |= teacher | {"kl": mean["kl"], "agreement": mean["agree"]}
    if "exit_kl" in mean:
        out |= {"exit_kl": mean["exit_kl"], "exit_agreement": mean["exit_agree"]}
    return out


def _prepare_folder(out: Path, experiment: Experiment, resume: bool) -> None:
    """Make the run's folder and save the resolved config; refuse to mix two runs."""
    path, text = out / "config.json", resolved(experiment)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if path.exists() and not resume:
            raise UsageError(f"{out} already holds a run: give --resume to go on with it, or another --out")
        if path.exists() and _identity(path.read_text()) != _identity(text):
            raise UsageError(
                f"{path} belongs to another run (model, data, plan or optimiser differ): use another --out"
            )
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}") from None


def _identity(text: str) -> str:
    """What must not change between a run and its resumption.

    A field that is off (0, false, null) counts as absent: a run that began before the field existed lacks it.
    """

    def on(tree):
        return {n: on(v) for n, v in tree.items() if v} if isinstance(tree, dict) else tree

    kept = on(json.loads(text))
    for name in (
        "log_every",
        "evaluate_every",
        "checkpoint_every",
        "keep_checkpoints",
        "tensorboard",
        "mesh",
        "evaluation",
    ):
        kept.pop(name, None)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
