"""A first short run on a GPU: which kernels are right and fast, and the speed of the engine with them.

    python -m benchmarks.first_light [--minutes 9] [--output FOLDER] [--candidates MODULE]
    python -m benchmarks.first_light --shape tiny      # on a CPU: only to see that it runs

A kernel that was never run may hang or crash. Every line of the table therefore runs in another process,
`worker`, under a time limit, and results are written after each (`kernels/check/supervisor.py`). `candidates`
lists the possible choices, `kernels` and `engine` measure, `report` names the winners and the goals met.
"""
