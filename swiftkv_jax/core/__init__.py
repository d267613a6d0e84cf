"""The model: weights, layers, rows, cache, and the loop over layers in its two forms."""
