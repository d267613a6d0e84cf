"""The first minutes on a GPU: what is right, what is fast, and what the engine makes of it.

    python -m benchmarks.first_light [--minutes 9] [--output FOLDER] [--candidates MODULE]
    python -m benchmarks.first_light --shape tiny      # on a CPU: that it runs, not how fast

A kernel that was never run may hang, or take its process down. Every line of the table therefore runs in
another process, `worker`, under a time limit, and what is known is written after each
(`kernels/check/supervisor.py`). `candidates` are what may be chosen, `kernels` and `engine` measure, `report`
says who won and what goals were met.
"""
