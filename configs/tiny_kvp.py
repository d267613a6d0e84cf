"""KV prediction on the demo's teacher: four of its eight layers read prompts for it.

    python train.py --config configs/tiny_kvp.py
    python serve.py --model runs/tiny_kvp/export

The predictor starts from least squares; then the KL to the teacher trains it and its auxiliary. The
paper's losses,
    --set loss.kl_weight=0 --set loss.lm_weight=1 --set loss.aux_weight=1
lower cross-entropy but raise KL, since the auxiliary learns more of the corpus than the teacher knows.
"""

from swiftkv_jax.distill.config import (
    Experiment,
    MeshConfig,
    OptimizerConfig,
    PredictConfig,
    PredictionLossConfig,
)
from swiftkv_jax.distill.data import DataConfig

corpus = ("demo/corpus.jsonl.xz",)

config = Experiment(
    name="tiny_kvp",
    model="demo/teacher",
    predict=PredictConfig(keep=(0, 2, 4, 6)),
    trainable="predictor",
    data=DataConfig(sources=corpus, split="train", seq_len=256, batch_size=4, long_documents="fill"),
    evaluation=DataConfig(sources=corpus, split="held_out", seq_len=256, batch_size=8, long_documents="fill"),
    evaluation_batches=6,
    loss=PredictionLossConfig(kl_weight=1.0, lm_weight=0.0, aux_weight=0.0, chunk_mib=4.0),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup=0.05, weight_decay=0.0, schedule="linear"),
    mesh=MeshConfig(fsdp=1, tensor=-1),  # four rows a step are too few to shard
    dtype="float32",
    steps=60,
    remat=False,
    log_every=10,
    checkpoint_every=100,
)
