"""Training of each compared system, on equally many tokens of the same text."""

import dataclasses
import re
from pathlib import Path

from benchmarks.papers.compare.evaluation import ROWS, TRAINED
from benchmarks.papers.compare.systems import System
from swiftkv_jax.checkpoint.adapter import from_pretrained
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.distill.config import Experiment, MeshConfig, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data.samples import DataConfig
from swiftkv_jax.distill.loop import opened


def experiment(system: System, model: str, text: str, length: int, steps: int) -> Experiment:
    """The experiment that trains a system of `model`: a student by the KL to the model, an auxiliary and its
    predictor by the KL of the model on predicted rows to the model, layers alone as a language model."""
    data = DataConfig(sources=(text,), split="train", seq_len=length, batch_size=ROWS, long_documents="fill")
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup=0.05, weight_decay=0.0, schedule="linear")
    how = {"mesh": MeshConfig(fsdp=1, tensor=-1), "dtype": "float32", "export_dtype": "float32"}
    how |= {"steps": steps, "remat": False, "checkpoint_every": 0, "plan": PlanConfig(split=1)}
    name = f"{system.name}, {system.setting}"
    plain = Experiment(name=name, model=model, data=data, optimizer=optimizer, **how)
    return dataclasses.replace(plain, **({"plan": PlanConfig()} | system.training))


def trained(system: System, model: str, text: str, length: int, steps: int, out: Path) -> System:
    """The system after so many steps; an interrupted run in `out` is resumed.

    Raises:
      UsageError: the run refuses its input, or a signal ended it.
    """
    e = experiment(system, model, text, length, steps)
    folder = out / re.sub(r"\W+", "-", e.name).strip("-")
    with opened(e, folder, resume=folder.exists(), say=lambda line: None) as run:
        result = run.go()
    if result.export is None:
        raise UsageError(f"training {e.name} was ended by a signal: the same command goes on from {folder}")
    made, params = from_pretrained(str(result.export), dtype="float32")
    return system._replace(name=system.name + TRAINED, model=made, params=params)
