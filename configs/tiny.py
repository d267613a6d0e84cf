"""The demo: SwiftKV at 50 % on the 3.6 M-parameter teacher in demo/teacher; what `make demo` runs.

    python train.py --config configs/tiny.py
    python train.py --config configs/tiny.py --set plan.share=2 --out runs/tiny_acrosskv
    python train.py --config configs/tiny.py --set loss.exit_weight=1.0 --out runs/tiny_exit

The last also trains an exit head, for `serve.py --drafter exit`. It affects the student only through the
common clipping of the gradient's norm.
"""

from swiftkv_jax.distill.config import Experiment, LossConfig, MeshConfig, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data import DataConfig

corpus = ("demo/corpus.jsonl.xz",)

config = Experiment(
    name="tiny",
    model="demo/teacher",
    plan=PlanConfig(split=4, init="least_squares", init_tokens=65_536),
    # Half of each batch is one context of the model's full length, half are eight short ones.
    data=DataConfig(
        sources=corpus,
        split="train",
        seq_len=2048,
        batch_size=2,
        long_documents="fill",
        piece_lengths=(256, 2048),
    ),
    evaluation=DataConfig(
        sources=corpus, split="held_out", seq_len=2048, batch_size=2, long_documents="fill"
    ),
    eval_lengths=(256, 2048),
    evaluation_batches=0,
    loss=LossConfig(chunk_mib=4.0),  # a chunk of logits stays in a CPU's caches
    optimizer=OptimizerConfig(
        learning_rate=2e-3, warmup=0.05, beta2=0.98, weight_decay=0.0, schedule="linear"
    ),
    mesh=MeshConfig(fsdp=1, tensor=-1),  # two rows a step are too few to shard
    dtype="float32",
    steps=80,
    remat=False,
    log_every=10,
    checkpoint_every=100,
)
