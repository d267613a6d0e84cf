"""SwiftKV for Llama-3.2-3B-Instruct, 40 % (11 of 28 layers) of the prompt's layers skipped: the paper's
recipe (appendix A.1).

    python train.py --config configs/llama3_2_3b.py
    python train.py --config configs/llama3_2_3b.py --compile-only --topology v5p:2x2x1

Meant for v5p:2x2x1 or h100:1x1x8. The paper reports 65.55 against the teacher's 66.47 at 40 % (Table 2); 50
%: --set plan.split=14, 25 %: --set plan.split=21.
"""

from paper_recipe import paper_recipe

config = paper_recipe("llama3_2_3b", "meta-llama/Llama-3.2-3B-Instruct", split=17)
