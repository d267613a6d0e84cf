"""SwiftKV for Llama-3.1-405B-Instruct-FP8, whose frozen weights stay in 8 bits: the paper's recipe (appendix
A.1).

    python train.py --config configs/llama405b_fp8.py
    python train.py --config configs/llama405b_fp8.py --compile-only --topology h200:1x1x8
    swiftkv plan configs/architectures/llama405b.json --quantization fp8

Meant for h200:1x1x8; the student is served by 8 H100s. The paper reports 85.9 against the teacher's 86.6
(Table 2).
"""

import dataclasses

from llama405b import config as wide

from swiftkv_jax.distill.config import MeshConfig

config = dataclasses.replace(
    wide,
    name="llama405b_fp8",
    model="meta-llama/Llama-3.1-405B-Instruct-FP8",
    quantization="fp8",
    mesh=MeshConfig(fsdp=-1),
    data=dataclasses.replace(wide.data, batch_size=8),
)
