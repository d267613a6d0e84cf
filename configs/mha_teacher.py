"""Pretrain the multi-head teacher, 1.1 M parameters, that docs/slim.md converts, on the demo's corpus.

    python train.py --config configs/mha_teacher.py --out runs/mha_teacher
    swiftkv slim runs/mha_teacher/export --out runs/mha_slim --forms k

Expect 4.48 nats per held-out token. It took 11 minutes on 2 shared CPU cores (AMD EPYC, 2026-11-24, jax
0.10.2); its W_K have condition numbers of 2e3 to 3e4. The export is in float32, and so is its W_KV.
"""

from pathlib import Path

from swiftkv_jax.config import ModelConfig
from swiftkv_jax.distill.config import Experiment, LossConfig, OptimizerConfig
from swiftkv_jax.distill.data import DataConfig

config = Experiment(
    name="mha_teacher",
    architecture=ModelConfig.from_hf(Path(__file__).with_name("architectures") / "mha_teacher.json"),
    tokenizer="demo/tokenizer",
    data=DataConfig(
        sources=("demo/corpus.jsonl.xz",), split="train", seq_len=256, batch_size=8, long_documents="fill"
    ),
    evaluation=DataConfig(sources=("demo/corpus.jsonl.xz",), split="held_out", seq_len=256, batch_size=8),
    trainable="all",
    loss=LossConfig(kl_weight=0.0, lm_weight=1.0),
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup=0.05, weight_decay=0.1, beta2=0.98),
    dtype="float32",
    remat=False,
    steps=600,
    evaluate_every=300,
    evaluation_batches=4,
    checkpoint_every=300,
    export_dtype="float32",
)
