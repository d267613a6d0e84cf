"""A model, and the data that it is measured on before training."""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from swiftkv_jax.checkpoint.hf import from_pretrained, local_folder
from swiftkv_jax.cli import splits
from swiftkv_jax.cli.convert import apart
from swiftkv_jax.common.progress import Say
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import sharding
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.core.surgery import check_teacher
from swiftkv_jax.distill.config import Experiment, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig, DataLoader, evaluation_batches
from swiftkv_jax.distill.data.packing import Batch
from swiftkv_jax.distill.start import check_vocabulary
from swiftkv_jax.text.tokenizer import Tokenizer, load_tokenizer

_ROWS = 4  # of a batch on each device
_LENGTH = 512  # tokens of a row


@dataclasses.dataclass(frozen=True)
class Measured:
    """A standard model on all devices, with batches to fit on and to evaluate on.

    Attributes:
      experiment: a run on these data; none of its steps is taken.
    """

    model: Transformer
    params: PyTree
    mesh: Mesh
    experiment: Experiment
    fit: list[Batch]
    held_out: list[Batch]

    @classmethod
    def open(cls, name: str, sources: tuple[str, ...], scratch: Path, max_tokens: int) -> "Measured":
        """The model `name` and about `max_tokens` tokens of `sources`, three quarters of them to fit on.

        Raises:
          UsageError: no such model or text, no standard model, or too little text.
        """
        folder = local_folder(name)
        tokenizer = load_tokenizer(folder)
        check_vocabulary(tokenizer, ModelConfig.from_hf(folder))
        mesh = sharding.make_mesh(fsdp=-1)
        data = DataConfig(
            sources=sources, seq_len=_LENGTH, batch_size=_ROWS * mesh.size, long_documents="fill"
        )
        return cls.of(folder, tokenizer, *apart(data, scratch), mesh, max_tokens)

    @classmethod
    def of(
        cls,
        folder: Path,
        tokenizer: Tokenizer,
        fit: DataConfig,
        held_out: DataConfig,
        mesh: Mesh,
        max_tokens: int,
    ) -> "Measured":
        """The model in a folder, and batches of these data."""
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        model, params = from_pretrained(folder, dtype=dtype, mesh=mesh)
        check_teacher(model)
        length = min(_LENGTH, fit.seq_len, model.config.max_position_embeddings)
        shape = {"seq_len": length, "batch_size": _ROWS * mesh.size}
        fit, held_out = dataclasses.replace(fit, **shape), dataclasses.replace(held_out, **shape)
        split = KVPlan.standard(model.config.num_layers).num_layers - 1
        experiment = Experiment(
            name="plan", model=str(folder), plan=PlanConfig(split=split), data=fit, dtype=dtype, steps=1
        )
        count = math.ceil(max_tokens / (length * fit.batch_size) / 4)
        loader = DataLoader(fit, tokenizer)
        try:
            chosen = [batch for batch, _ in itertools.islice(loader, 3 * count)]
        finally:
            loader.close()
        place = NamedSharding(mesh, sharding.spec("B ."))
        placed, evaluated = (
            [jax.device_put(batch, place) for batch in batches]
            for batches in (chosen, evaluation_batches(held_out, tokenizer, count))
        )
        return cls(model, params, mesh, experiment, placed, evaluated)

    @property
    def tokens(self) -> np.ndarray:
        """The ids to evaluate on, one text after the other."""
        return np.concatenate([np.asarray(b.tokens)[np.asarray(b.segments) > 0] for b in self.held_out])

    def untrained(self, chosen: Iterable[int], say: Say, share: int = 1) -> list[splits.Untrained]:
        """The cost of each of these splits before training, reported as it is found."""
        plans = [KVPlan.swiftkv(self.model.config.num_layers, split, share) for split in chosen]
        return splits.untrained(self.model, self.params, self.experiment, plans, self.fit, self.held_out, say)
