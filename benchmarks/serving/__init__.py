"""A client that times servers of OpenAI's API, by the method and under the names of `vllm bench serve`.

    python -m benchmarks.serving [fixed] [sharegpt] [rates] [budgets]

`timeline` defines every number, `client` sends requests, `workloads` makes them, `servers` starts the servers
to compare, `report` writes the results.
"""
