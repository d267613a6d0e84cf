"""A run of four steps, of which commit 50b455b made two and then all."""

from swiftkv_jax.distill.config import Experiment, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data import DataConfig

config = Experiment(
    name="small",
    model="teacher",
    tokenizer="teacher",
    plan=PlanConfig(split=2, share=2, init="fold"),
    data=DataConfig(sources=("data.jsonl",), seq_len=16, batch_size=2),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    dtype="float32",
    export_dtype="float32",
    steps=4,
    remat=False,
    checkpoint_every=2,
)
