"""Pretrain the demo's teacher, 3.6 M parameters, on the Python documentation in demo/corpus.jsonl.xz.

Two phases, the second at the demo's full context of 2048 positions:

    python train.py --config configs/demo_teacher.py --out runs/demo_teacher
    python train.py --config configs/demo_teacher.py --out runs/demo_teacher_2048 \\
        --set model=runs/demo_teacher/export --set steps=100 --set optimizer.learning_rate=6e-4 \\
        --set data.seq_len=2048 --set data.batch_size=2 --set data.seed=1

The export of the second phase is demo/teacher. On 2 cores of a shared Xeon with AMX, beside other work, the
first took 33 minutes and the second 14. On held-out data the teacher reaches 3.44 nats per token, an
interpolated bigram model 4.19 (demo/check_teacher.py, 2026-11-21, jax 0.10.2). 1600 steps reach 3.09, but
then the later layers matter more, and the student agrees less often (docs/decisions.md).
"""

from pathlib import Path

from swiftkv_jax.config import ModelConfig
from swiftkv_jax.distill.config import Experiment, LossConfig, OptimizerConfig
from swiftkv_jax.distill.data import DataConfig

config = Experiment(
    name="demo_teacher",
    architecture=ModelConfig.from_hf(Path(__file__).with_name("architectures") / "demo_teacher.json"),
    tokenizer="demo/tokenizer",
    data=DataConfig(
        sources=("demo/corpus.jsonl.xz",), split="train", seq_len=256, batch_size=16, long_documents="fill"
    ),
    evaluation=DataConfig(sources=("demo/corpus.jsonl.xz",), split="held_out", seq_len=2048, batch_size=2),
    trainable="all",
    loss=LossConfig(kl_weight=0.0, lm_weight=1.0),
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup=0.05, weight_decay=0.1, beta2=0.98),
    steps=1000,
    evaluate_every=500,
    evaluation_batches=6,
    checkpoint_every=250,
)
