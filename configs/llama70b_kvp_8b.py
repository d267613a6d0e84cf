"""KV prediction for Llama-3.1-70B-Instruct: Llama-3.1-8B-Instruct reads its prompts.

    python train.py --config configs/llama70b_kvp_8b.py
    python train.py --config configs/llama70b_kvp_8b.py --compile-only --topology h100:1x2x8

Meant for h100:1x2x8 or v5p:2x2x4. Auxiliary and predictor train, 8.20 B parameters; the 70 B are frozen.
A prompt of 1024 tokens then takes 10 % of the base's FLOPs. Everything else is as in llama8b_kvp_1b.py. Only
compiled, not run yet.
"""

import dataclasses

from llama8b_kvp_1b import config as smaller
from paper_recipe import ARCHITECTURES

from swiftkv_jax.config import ModelConfig
from swiftkv_jax.distill.config import PredictConfig

config = dataclasses.replace(
    smaller,
    name="llama70b_kvp_8b",
    model="meta-llama/Llama-3.1-70B-Instruct",
    architecture=ModelConfig.from_hf(ARCHITECTURES / "llama70b.json"),
    predict=PredictConfig(
        auxiliary="meta-llama/Llama-3.1-8B-Instruct",
        architecture=ModelConfig.from_hf(ARCHITECTURES / "llama8b.json"),
    ),
)
