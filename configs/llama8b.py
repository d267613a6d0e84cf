"""SwiftKV for Llama-3.1-8B-Instruct, 50 % of the prompt's layers skipped: the paper's recipe (appendix
A.1).

    python train.py --config configs/llama8b.py
    python train.py --config configs/llama8b.py --compile-only --topology v5p:2x2x4

Meant for v5p:2x2x4 or h100:1x1x8. 402.7 M of 8.03 B parameters train (5.0 %). The paper reports 3 hours on
8 H100s for 680 M tokens, and 72.70 against the teacher's 73.71 (average of seven tasks, Table 2). AcrossKV:
--set plan.share=2 (or 4, 8, 16).
"""

from paper_recipe import paper_recipe

config = paper_recipe("llama8b", "meta-llama/Llama-3.1-8B-Instruct", split=16)
