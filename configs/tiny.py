"""The demo: SwiftKV at 50 % on the 3.6 M-parameter teacher in demo/teacher; what `make demo` runs.

    python train.py --config configs/tiny.py
    python train.py --config configs/tiny.py --set plan.share=2 --out runs/tiny_acrosskv

About a minute and a half of steps on 2 CPU cores; expect about three quarters of the cross-entropy that
rewiring cost to come back, and more with AcrossKV, which costs more to begin with. demo/README.md has the
recorded run.
"""

from swiftkv_jax.distill.config import Experiment, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data import DataConfig

corpus = ("demo/corpus.jsonl.xz",)

config = Experiment(
    name="tiny",
    model="demo/teacher",
    plan=PlanConfig(split=4),
    data=DataConfig(sources=corpus, split="train", seq_len=256, batch_size=8, long_documents="fill"),
    evaluation=DataConfig(sources=corpus, split="held_out", seq_len=256, batch_size=8, long_documents="fill"),
    evaluation_batches=0,
    optimizer=OptimizerConfig(
        learning_rate=2.5e-3, warmup=0.05, beta2=0.98, weight_decay=0.0, schedule="linear"
    ),
    dtype="float32",
    steps=320,
    remat=False,
    log_every=25,
    checkpoint_every=100,
)
