"""What a plan costs and what a model looks like inside: FLOPs, cache bytes, layer similarity, plots."""
