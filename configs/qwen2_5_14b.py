"""SwiftKV for Qwen2.5-14B-Instruct, 25 % of the prompt's layers skipped: the paper's recipe (appendix A.1).

    python train.py --config configs/qwen2_5_14b.py
    python train.py --config configs/qwen2_5_14b.py --compile-only --topology v5p:2x2x4

Meant for v5p:2x2x4 or h100:1x4x8. The paper reports 76.23 against the teacher's 77.38 at 25 %; at 50 % it
falls to 69.93 (Table 2).
"""

from paper_recipe import paper_recipe

config = paper_recipe("qwen2_5_14b", "Qwen/Qwen2.5-14B-Instruct", split=36)
