"""SwiftKV for Qwen3-4B on one GPU: prompts run 27 of 36 layers.

    python train.py --config configs/qwen3_4b.py
    python train.py --config configs/qwen3_4b.py --compile-only --topology h100:1x1x1

Meant for one H100. Not run yet; the tests marked `aot` compile it for one.
"""

from one_gpu import one_gpu

config = one_gpu("qwen3_4b", "Qwen/Qwen3-4B", split=27)
