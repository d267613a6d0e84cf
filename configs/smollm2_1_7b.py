"""SwiftKV for SmolLM2-1.7B-Instruct on one GPU: prompts run 16 of 24 layers.

    python train.py --config configs/smollm2_1_7b.py
    python train.py --config configs/smollm2_1_7b.py --compile-only --topology h100:1x1x1

Meant for one H100. Not run yet; the tests marked `aot` compile it for one.
"""

from one_gpu import one_gpu

config = one_gpu("smollm2_1_7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", split=16)
