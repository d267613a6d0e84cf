"""The SwiftKV paper's distillation (appendix A.1), which the configs of published models share.

For ArcticTraining's recipe and data see llama8b_reference.py.
"""

import dataclasses
from pathlib import Path

from swiftkv_jax.config import ModelConfig
from swiftkv_jax.distill.config import Experiment, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data import DataConfig

ARCHITECTURES = Path(__file__).with_name("architectures")
DATA = ("hf://HuggingFaceH4/ultrachat_200k", "hf://teknium/OpenHermes-2.5", "hf://Open-Orca/SlimOrca")


def paper_recipe(name: str, model: str, split: int, batch_size: int = 16, **changes) -> Experiment:
    """2 epochs of 8192 tokens with separated packing, lr 3e-4, weight decay 0.05, 5 % warm-up, temperature 2.

    The architecture is read from architectures/NAME.json; `changes` are other fields of the experiment.
    """
    data = DataConfig(sources=DATA, split="train", seq_len=8192, batch_size=batch_size, mask="assistant")
    return Experiment(
        name=name,
        model=model,
        architecture=ModelConfig.from_hf(ARCHITECTURES / f"{name}.json"),
        plan=PlanConfig(split=split, init="fold"),
        data=data,
        evaluation=dataclasses.replace(data, split="held_out", limit=2000),
        eval_lengths=(2048, 8192),
        evaluate_every=500,
        optimizer=OptimizerConfig(learning_rate=3e-4, weight_decay=0.05, warmup=0.05),
        epochs=2,
        **changes,
    )
