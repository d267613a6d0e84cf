"""SwiftKV for Qwen2.5-1.5B-Instruct on one GPU: prompts run 21 of 28 layers.

    python train.py --config configs/qwen2_5_1_5b.py
    python train.py --config configs/qwen2_5_1_5b.py --compile-only --topology h100:1x1x1

Meant for one H100. Not run yet; the tests marked `aot` compile it for one.
"""

from one_gpu import one_gpu

config = one_gpu("qwen2_5_1_5b", "Qwen/Qwen2.5-1.5B-Instruct", split=21)
