"""Analysis of plans and models: FLOPs, cache bytes, layer similarity, plots."""
