"""KV prediction for Llama-3.1-8B-Instruct: Llama-3.2-1B-Instruct reads its prompts.

    python train.py --config configs/llama8b_kvp_1b.py
    python train.py --config configs/llama8b_kvp_1b.py --compile-only --topology v5p:2x2x4

Meant for v5p:2x2x4 or h100:1x1x8. Auxiliary and predictor train, 1.27 B parameters; the 8 B are frozen.
A prompt of 1024 tokens then takes 14 % of the FLOPs. The losses are the paper's (arXiv 2410.08391, 4.3), but
the models are not (it pairs OpenELMs). Only compiled, not run yet.
"""

import dataclasses

from paper_recipe import ARCHITECTURES, DATA

from swiftkv_jax.config import ModelConfig
from swiftkv_jax.distill.config import Experiment, OptimizerConfig, PredictConfig, PredictionLossConfig
from swiftkv_jax.distill.data import DataConfig

data = DataConfig(sources=DATA, split="train", seq_len=2048, batch_size=64, mask="assistant")

config = Experiment(
    name="llama8b_kvp_1b",
    model="meta-llama/Llama-3.1-8B-Instruct",
    architecture=ModelConfig.from_hf(ARCHITECTURES / "llama8b.json"),
    predict=PredictConfig(
        auxiliary="meta-llama/Llama-3.2-1B-Instruct",
        architecture=ModelConfig.from_hf(ARCHITECTURES / "llama3_2_1b.json"),
    ),
    trainable="predictor",
    data=data,
    evaluation=dataclasses.replace(data, split="held_out", limit=2000),
    evaluate_every=500,
    loss=PredictionLossConfig(),
    optimizer=OptimizerConfig(
        learning_rate=3e-4, warmup=0.05, schedule="cosine", final_share=0.1, weight_decay=0.1, beta2=0.95
    ),
    epochs=2,
)
