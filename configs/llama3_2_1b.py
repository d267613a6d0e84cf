"""SwiftKV for Llama-3.2-1B-Instruct on one GPU: prompts run 10 of 16 layers.

    python train.py --config configs/llama3_2_1b.py
    python train.py --config configs/llama3_2_1b.py --compile-only --topology h100:1x1x1

Meant for one H100. Not run yet; the tests marked `aot` compile it for one.
"""

from one_gpu import one_gpu

config = one_gpu("llama3_2_1b", "meta-llama/Llama-3.2-1B-Instruct", split=10)
