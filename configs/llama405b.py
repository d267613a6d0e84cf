"""SwiftKV for Llama-3.1-405B-Instruct, 50 % of the prompt's layers skipped: the paper's recipe (appendix
A.1).

    python train.py --config configs/llama405b.py
    python train.py --config configs/llama405b.py --compile-only --topology v5p:4x4x8

Meant for v5p:4x4x8 or h100:1x16x8. The paper trains on FP8 weights and reports 85.9 against the teacher's
86.6 (Table 2).
"""

from paper_recipe import paper_recipe

from swiftkv_jax.distill.config import MeshConfig

config = paper_recipe(
    "llama405b",
    "meta-llama/Llama-3.1-405B-Instruct",
    split=63,
    batch_size=32,
    mesh=MeshConfig(fsdp=-1, tensor=4),
)
