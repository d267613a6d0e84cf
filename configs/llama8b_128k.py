"""SwiftKV for Llama-3.1-8B-Instruct at its full context: rows of 131072 tokens, each on 16 chips.

    python train.py --config configs/llama8b_128k.py --compile-only --topology v5p:4x4x4

Meant for v5p:4x4x4. Half of the rows are one context of 131072 tokens, half are of 8192: a student trained on
short rows alone is not good at long ones (docs/architecture.md).
"""

import dataclasses

from paper_recipe import paper_recipe

from swiftkv_jax.distill.config import MeshConfig

recipe = paper_recipe(
    "llama8b",
    "meta-llama/Llama-3.1-8B-Instruct",
    split=16,
    batch_size=4,
    mesh=MeshConfig(fsdp=4, context=-1),
)
long = {"seq_len": 131_072, "long_documents": "fill", "piece_lengths": (8192, 131_072)}
config = dataclasses.replace(
    recipe,
    name="llama8b_128k",
    data=dataclasses.replace(recipe.data, **long),
    evaluation=dataclasses.replace(recipe.evaluation, **long),
    eval_lengths=(8192, 131_072),
)
