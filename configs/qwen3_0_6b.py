"""SwiftKV for Qwen3-0.6B on one GPU: prompts run 21 of 28 layers.

    python train.py --config configs/qwen3_0_6b.py
    python train.py --config configs/qwen3_0_6b.py --compile-only --topology h100:1x1x1

Meant for one H100. Not run yet; the tests marked `aot` compile it for one.
"""

from one_gpu import one_gpu

config = one_gpu("qwen3_0_6b", "Qwen/Qwen3-0.6B", split=21)
