"""SwiftKV for Llama-3.1-8B-Instruct by ArcticTraining's published recipe, on its data: OpenOrca, AceMath and
lmsys-chat, 500,000 rows of each.

    python train.py --config configs/llama8b_reference.py
    python train.py --config configs/llama8b_reference.py --compile-only --topology h100:1x1x8

Meant for h100:1x1x8, with a row of 8192 tokens on each GPU. lmsys-chat-1m requires accepting its terms on the
hub and logging in. Besides the data, the differences to the paper's recipe (paper_recipe.py) are the learning
rate, one epoch, no weight decay, a loss on hidden states, the reduction of the loss, and the start.
"""

import dataclasses

from paper_recipe import paper_recipe

from swiftkv_jax.distill.config import LossConfig, OptimizerConfig

SOURCES = (
    "hf://Open-Orca/OpenOrca[train[:500000]]",
    "hf://nvidia/AceMath-Instruct-Training-Data[general_sft_stage2[:500000]]",
    "hf://lmsys/lmsys-chat-1m[train[:500000]]",
)

recipe = paper_recipe("llama8b", "meta-llama/Llama-3.1-8B-Instruct", split=16, batch_size=8)
config = dataclasses.replace(
    recipe,
    name="llama8b_reference",
    plan=dataclasses.replace(recipe.plan, init="copy"),
    data=dataclasses.replace(recipe.data, sources=SOURCES),
    evaluation=dataclasses.replace(recipe.evaluation, sources=SOURCES),
    loss=LossConfig(hidden_weight=1.0, reduction="reference"),
    optimizer=OptimizerConfig(learning_rate=2e-4, weight_decay=0.0, warmup=0.05),
    epochs=1,
)
