"""The demo: SwiftKV at 50 % on the 3.6 M-parameter teacher in demo/teacher; what `make demo` runs.

    python train.py --config configs/tiny.py
    python train.py --config configs/tiny.py --set plan.share=2 --out runs/tiny_acrosskv
    python train.py --config configs/tiny.py --set loss.exit_weight=1.0 --out runs/tiny_exit

Three minutes of steps on 2 CPU cores. They close 78 % of the cross-entropy gap that rewiring opens, on
held-out rows of 256 tokens, with 0.928 agreement (2026-11-22, jax 0.10.2). The last trains an exit head
beside the student, for `serve.py --drafter exit`, and changes nothing else of it but through the common
bound on the gradient's norm.
"""

from swiftkv_jax.distill.config import Experiment, LossConfig, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data import DataConfig

corpus = ("demo/corpus.jsonl.xz",)

config = Experiment(
    name="tiny",
    model="demo/teacher",
    plan=PlanConfig(split=4),
    data=DataConfig(sources=corpus, split="train", seq_len=256, batch_size=8, long_documents="fill"),
    evaluation=DataConfig(sources=corpus, split="held_out", seq_len=256, batch_size=8, long_documents="fill"),
    evaluation_batches=0,
    loss=LossConfig(chunk_mib=4.0),  # a chunk of logits stays in a CPU's caches
    optimizer=OptimizerConfig(
        learning_rate=5e-3, warmup=0.05, beta2=0.98, weight_decay=0.0, schedule="linear"
    ),
    dtype="float32",
    steps=320,
    remat=False,
    log_every=25,
    checkpoint_every=100,
)
