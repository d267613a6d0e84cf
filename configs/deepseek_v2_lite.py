"""SwiftKV for DeepSeek-V2-Lite-Chat, 45 % of the prompt's layers skipped: the paper's recipe (appendix A.1).

    python train.py --config configs/deepseek_v2_lite.py
    python train.py --config configs/deepseek_v2_lite.py --compile-only --topology v5p:2x2x4
    swiftkv plan configs/architectures/deepseek_v2_lite.json --split 15 --share 2

Meant for v5p:2x2x4 or h100:1x1x8. Not run yet; a test marked `aot` compiles it for both. Routers and
experts stay frozen. The cache takes 31,104 bytes a token; with --set plan.share=2 (AcrossKV, which the paper
has not tried on latents) 24,192. Shared rows should start with --set plan.init=least_squares.
"""

from paper_recipe import paper_recipe

config = paper_recipe("deepseek_v2_lite", "deepseek-ai/DeepSeek-V2-Lite-Chat", split=15)
