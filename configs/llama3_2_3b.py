"""SwiftKV for Llama-3.2-3B-Instruct, 40 % (11 of 28 layers) of the prompt's layers skipped: the paper's
recipe (appendix A.1).

    python train.py --config configs/llama3_2_3b.py
    python train.py --config configs/llama3_2_3b.py --compile-only --topology v5p:2x2x1

Meant for v5p:2x2x1 or h100:1x1x8. The paper reports 65.55 against the teacher's 66.47 at 40 % (Table 2); 50
%: --set plan.split=14, 25 %: --set plan.split=21.

The reference recipe (ArcticTraining) differs: 1 epoch, lr 2e-4, no weight decay, OpenOrca + AceMath +
lmsys-chat, plus a hidden-state loss and its own mean:
    --set epochs=1 --set optimizer.learning_rate=2e-4 --set optimizer.weight_decay=0.0
    --set loss.hidden_weight=1.0 --set loss.reduction=reference --set plan.init=copy
"""

from swiftkv_jax.config import ModelConfig, RopeConfig
from swiftkv_jax.distill.config import paper_recipe

architecture = ModelConfig(
    vocab_size=128256,
    hidden_size=3072,
    intermediate_size=8192,
    num_layers=28,
    num_heads=24,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    rope=RopeConfig(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    dtype="bfloat16",
)

config = paper_recipe(
    "llama3_2_3b",
    "meta-llama/Llama-3.2-3B-Instruct",
    architecture,
    split=17,
)
