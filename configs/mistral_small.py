"""SwiftKV for Mistral-Small-Instruct-2409, 50 % of the prompt's layers skipped: the paper's recipe
(appendix A.1).

    python train.py --config configs/mistral_small.py
    python train.py --config configs/mistral_small.py --compile-only --topology v5p:2x2x4

Meant for v5p:2x2x4 or h100:1x4x8. The paper reports 77.24 against the teacher's 78.23 (Table 2); no public
code trains this family.

The reference recipe (ArcticTraining) differs: 1 epoch, lr 2e-4, no weight decay, OpenOrca + AceMath +
lmsys-chat, plus a hidden-state loss and its own mean:
    --set epochs=1 --set optimizer.learning_rate=2e-4 --set optimizer.weight_decay=0.0
    --set loss.hidden_weight=1.0 --set loss.reduction=reference --set plan.init=copy
"""

from swiftkv_jax.config import ModelConfig, RopeConfig
from swiftkv_jax.distill.config import paper_recipe

architecture = ModelConfig(
    family="mistral",
    vocab_size=32768,
    hidden_size=6144,
    intermediate_size=16384,
    num_layers=56,
    num_heads=48,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=32768,
    rope=RopeConfig(rope_theta=1000000.0),
    dtype="bfloat16",
)

config = paper_recipe(
    "mistral_small",
    "mistralai/Mistral-Small-Instruct-2409",
    architecture,
    split=28,
)
