"""What a decoder layer does after its attention: output projection, norm, gated MLP, both sums."""
