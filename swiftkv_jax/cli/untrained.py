"""Students before training: fitted by least squares, evaluated on held-out text; the choice of a split."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from swiftkv_jax.analysis.flops import cache_bytes_per_token, prompt_gflop
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.progress import Say, working
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core import sharding
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.distill import loop, start
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import LEAST_SQUARES, Experiment, PlanConfig, PredictConfig
from swiftkv_jax.distill.data.loader import DataConfig, DataLoader, evaluation_batches
from swiftkv_jax.distill.data.packing import Batch
from swiftkv_jax.distill.data.samples import documents_of
from swiftkv_jax.distill.data.sources import PLACE, split_of
from swiftkv_jax.text.tokenizer import Tokenizer

ROWS = 4  # of a batch on each device
_PIECE = 4000  # characters that a text is cut into, where there are few documents
_EVERY = 10  # of these pieces one is held out
MOST_KL = 0.25  # nats per token
SHARE = "AcrossKV: number of later layers that share one row"  # the help of --share


class Untrained(NamedTuple):
    """A fitted student, with `evaluate_batch`'s sums of each held-out row."""

    recipe: steps.Recipe
    params: PyTree
    rows: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Trial:
    """The models of an experiment on all devices, with batches to fit on and to evaluate on."""

    experiment: Experiment
    tokenizer: Tokenizer
    loaded: list[start.Loaded]
    fit: list[Batch]
    held_out: list[Batch]

    def student(self, part: PlanConfig | PredictConfig, say: Say) -> Untrained:
        """The student that training would start with if this were the experiment's plan, or prediction.

        KV prediction with a tail of one token is evaluated as it is served, at every position.
        """
        name = "plan" if isinstance(part, PlanConfig) else "predict"
        experiment = dataclasses.replace(self.experiment, **{name: part})
        student, trained, frozen = start.prepare(experiment, self.loaded)
        recipe = start.make_recipe(experiment, student, 1)
        if experiment.fits_start:
            count = len(self.fit)
            with working(say, f"fitting keys and values by least squares on {count} batches") as doing:
                trained = recipe.method.fit(recipe, trained, frozen, doing.counted(self.fit))
        evaluate = partial(recipe.method.evaluate, recipe)
        if isinstance(student, Predicted) and student.prediction.tail == 1:
            evaluate = partial(evaluate, served=True)
        with working(say, "compiling and evaluating held-out rows") as doing:
            run = jax.jit(evaluate)
            sums = [jax.device_get(run(frozen, trained, batch)) for batch in doing.counted(self.held_out)]
        rows = {name: np.concatenate([each[name] for each in sums]) for name in sums[0]}
        return Untrained(recipe, steps.merge(trained, frozen.student), rows)

    def by_split(self, splits: Iterable[int], say: Say) -> dict[int, dict[str, float]]:
        """`costs` of each split's student, reported as they are found; with too few tokens to fit on, the
        start is "fold"."""
        tokens, config = sum(int((b.segments > 0).sum()) for b in self.fit), self.loaded[0][0].config
        init = LEAST_SQUARES if tokens > config.hidden_size else "fold"
        results = {}
        for split in splits:
            student = self.student(PlanConfig(split=split, init=init), say)
            cost = results[split] = costs(student, student.rows, self.experiment.data.seq_len)
            say(
                f"split {split:3} of {config.num_layers}: untrained ({init}): gap {cost['gap']:6.3f} nats "
                f"per token, KL {cost['kl']:.3f}, agreement {cost['agreement']:.1%}"
            )
        return results


@contextmanager
def opened(experiment: Experiment, tokenizer: Tokenizer, say: Say) -> Iterator[Trial]:
    """An experiment ready to make students on all devices; none of its steps is taken."""
    data, evaluation = experiment.data, experiment.evaluation
    assert evaluation is not None  # an untrained student is made to be evaluated
    mesh = sharding.make_mesh(fsdp=-1)
    place = NamedSharding(mesh, sharding.spec("B ."))
    with jax.set_mesh(mesh):
        count = math.ceil(experiment.start.init_tokens / (data.batch_size * data.seq_len))
        loader = DataLoader(data, tokenizer)
        try:
            fit = [jax.device_put(batch, place) for batch, _ in itertools.islice(loader, count)]
        finally:
            loader.close()
        held_out = evaluation_batches(evaluation, tokenizer, experiment.evaluation_batches)
        with working(say, "reading the weights"):
            loaded = start.load(experiment, Path(experiment.model), tokenizer, mesh)
        yield Trial(experiment, tokenizer, loaded, fit, [jax.device_put(batch, place) for batch in held_out])


def on_tokens(folder: Path, fit: DataConfig, held_out: DataConfig, tokens: int) -> Experiment:
    """An experiment on about so many tokens of these data, three quarters of them to fit on."""
    config = ModelConfig.from_hf(folder)
    length = min(512, fit.seq_len, config.max_position_embeddings)
    shape = {"seq_len": length, "batch_size": ROWS * jax.device_count()}
    count = math.ceil(tokens / (length * shape["batch_size"]) / 4)
    return Experiment(
        name="untrained",
        model=str(folder),
        plan=PlanConfig(split=config.num_layers - 1, init_tokens=3 * count * length * shape["batch_size"]),
        data=dataclasses.replace(fit, **shape),
        evaluation=dataclasses.replace(held_out, **shape),
        evaluation_batches=count,
        dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
        steps=1,
    )


def costs(run: Untrained | loop.Run, rows: dict[str, np.ndarray], length: int) -> dict[str, float]:
    """The cost of a student, from the sums of held-out rows of `length` tokens, as `evaluate_batch` has them.

    "gap" is the student's cross-entropy minus its teacher's, with its standard error over rows, "gap_error";
    "kl" the KL from teacher to student, all in nats per token; "agreement" is the share of positions where
    both have the same most likely token, and "tokens" the number of tokens evaluated. "prompt_flops" and
    "cache_bytes" are relative to the teacher's: FLOPs of prompt tokens in the layers at that length, and
    bytes of a token's rows. KV prediction has "auxiliary_gap" instead, of the auxiliary by itself.
    """
    means = loop.summarise(rows, has_teacher=True)
    student, teacher = run.recipe.student, means["teacher_cross_entropy"]
    counted = rows["tokens"] > 0
    gaps = (rows["student"] - rows["teacher"])[counted] / rows["tokens"][counted]
    result = {
        "cross_entropy": means["cross_entropy"],
        "teacher_cross_entropy": teacher,
        "gap": means["cross_entropy"] - teacher,
        "gap_error": float(np.std(gaps, ddof=1) / math.sqrt(len(gaps))) if len(gaps) > 1 else math.nan,
        "kl": means["kl"],
        "agreement": means["agreement"],
        "tokens": float(rows["tokens"].sum()),
    }
    if isinstance(student, Predicted):
        return result | {"auxiliary_gap": means["auxiliary_cross_entropy"] - teacher}
    config, plan = student.config, student.plan
    return result | {
        "prompt_flops": prompt_gflop(config, plan, length) / prompt_gflop(config, None, length),
        "cache_bytes": cache_bytes_per_token(config, plan) / cache_bytes_per_token(config),
    }


def apart(data: DataConfig, scratch: Path) -> tuple[DataConfig, DataConfig]:
    """The data to fit or train on, and the held-out data to evaluate on.

    The same documents are held out as in training; with few documents, every tenth piece, in files that are
    written to `scratch`.
    """
    documents = documents_of(data)
    if sum(split_of(name) == "held_out" for name in documents.ids()) >= 8:
        return dataclasses.replace(data, split="train"), dataclasses.replace(data, split="held_out")
    if data.weights:
        raise UsageError(f"{', '.join(data.sources)} hold too few documents for weights: leave weights out")
    pieces: list[dict] = []
    for document in (documents[i] for i in range(len(documents))):
        place = {PLACE: document.place or document.id}
        if document.messages:
            pieces.append({"messages": list(document.messages)} | place)
        cuts = range(0, len(document.text), _PIECE)
        pieces += [{"text": document.text[start : start + _PIECE]} | place for start in cuts]
    if len(pieces) < _EVERY:
        needed = f"give a text of {_PIECE * _EVERY:,} characters or more"
        raise UsageError(f"{', '.join(data.sources)} is too short: {needed}")
    scratch.mkdir(parents=True, exist_ok=True)
    held_out = pieces[_EVERY - 1 :: _EVERY]
    del pieces[_EVERY - 1 :: _EVERY]
    configs = []
    for path, part in ((scratch / "fit.jsonl", pieces), (scratch / "held_out.jsonl", held_out)):
        path.write_text("".join(json.dumps(piece) + "\n" for piece in part), encoding="utf-8")
        configs.append(dataclasses.replace(data, sources=(str(path),), split="all", columns=()))
    return configs[0], configs[1]


def split_candidates(layers: int) -> list[int]:
    """Splits to measure: every eighth of the depth from a quarter on."""
    return sorted({min(max(1, round(layers * part / 8)), layers - 1) for part in range(2, 8)})


def chosen_split(kl: Mapping[int, float], layers: int) -> int:
    """The earliest split from half depth on whose untrained student has a KL of at most `MOST_KL`; the best
    one if there is none. `kl` is in nats per token, by split.

    In the paper 50 % SwiftKV costs 1 to 2 % of accuracy after distillation, and beyond that quality drops
    quickly; where the later layers' inputs are less similar (Qwen), 50 % is already too much (SwiftKV paper,
    section 4.2). SmolLM2-135M's students at half depth, with a KL of 0.47 before training, find no line of a
    prompt after it (docs/results.md). This is a first guess: only distillation shows what a split costs.
    """
    half = [split for split in kl if 2 * split >= layers]
    if not half:
        raise UsageError("no split at half depth or later was evaluated")
    return min((split for split in half if kl[split] <= MOST_KL), default=min(half, key=kl.__getitem__))
