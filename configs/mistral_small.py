"""SwiftKV for Mistral-Small-Instruct-2409, 50 % of the prompt's layers skipped: the paper's recipe
(appendix A.1).

    python train.py --config configs/mistral_small.py
    python train.py --config configs/mistral_small.py --compile-only --topology v5p:2x2x4

Meant for v5p:2x2x4 or h100:1x4x8. The paper reports 77.24 against the teacher's 78.23 (Table 2); no public
code trains this family.
"""

from paper_recipe import paper_recipe

config = paper_recipe("mistral_small", "mistralai/Mistral-Small-Instruct-2409", split=28)
