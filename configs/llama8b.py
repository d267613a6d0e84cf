"""SwiftKV for Llama-3.1-8B-Instruct, 50 % of the prompt's layers skipped: the paper's recipe (appendix
A.1).

    python train.py --config configs/llama8b.py
    python train.py --config configs/llama8b.py --compile-only --topology v5p:2x2x4

Meant for v5p:2x2x4 or h100:1x1x8. 402.7 M of 8.03 B parameters train (5.0 %). The paper reports 3 hours on
8 H100s for 680 M tokens, and 72.70 against the teacher's 73.71 (average of seven tasks, Table 2). AcrossKV:
--set plan.share=2 (or 4, 8, 16).

The reference recipe (ArcticTraining) differs: 1 epoch, lr 2e-4, no weight decay, OpenOrca + AceMath +
lmsys-chat, plus a hidden-state loss and its own mean:
    --set epochs=1 --set optimizer.learning_rate=2e-4 --set optimizer.weight_decay=0.0
    --set loss.hidden_weight=1.0 --set loss.reduction=reference --set plan.init=copy
"""

from swiftkv_jax.config import ModelConfig, RopeConfig
from swiftkv_jax.distill.config import paper_recipe

architecture = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    rope=RopeConfig(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    dtype="bfloat16",
)

config = paper_recipe(
    "llama8b",
    "meta-llama/Llama-3.1-8B-Instruct",
    architecture,
    split=16,
)
