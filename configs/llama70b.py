"""SwiftKV for Llama-3.1-70B-Instruct, 50 % of the prompt's layers skipped: the paper's recipe (appendix
A.1).

    python train.py --config configs/llama70b.py
    python train.py --config configs/llama70b.py --compile-only --topology v5p:4x4x4

Meant for v5p:4x4x4 or h100:1x4x8. The paper reports 5 hours on 32 H100s, and 82.98 against the teacher's
84.31 (Table 2).
"""

from paper_recipe import paper_recipe

config = paper_recipe("llama70b", "meta-llama/Llama-3.1-70B-Instruct", split=40, batch_size=64)
