"""Distillation on one GPU of 80 GB, which the configs of small published models share.

A step has 16 rows of 4096 tokens, one in memory at a time; the new cache rows start from least squares. The
rest is the paper's recipe. The splits follow the paper's findings on models of the same family, and nothing
was trained with them yet. `swiftkv plan MODEL --text FILE` measures the cost of other splits.
"""

import dataclasses

from paper_recipe import paper_recipe

from swiftkv_jax.distill.config import Experiment

_LENGTH = 4096


def one_gpu(name: str, model: str, split: int) -> Experiment:
    """The experiment; the architecture is read from architectures/NAME.json."""
    e = paper_recipe(name, model, split)
    assert e.evaluation is not None  # the recipe has one
    return dataclasses.replace(
        e,
        plan=dataclasses.replace(e.plan, init="least_squares"),
        data=dataclasses.replace(e.data, seq_len=_LENGTH),
        evaluation=dataclasses.replace(e.evaluation, seq_len=_LENGTH, batch_size=1),
        evaluation_batches=64,
        eval_lengths=(2048, _LENGTH),
        optimizer=dataclasses.replace(e.optimizer, accumulate=e.data.batch_size),
        epochs=1,
    )
