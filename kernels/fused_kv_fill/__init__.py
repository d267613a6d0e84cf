"""The fused fill, from stream to pages in one pass: norm, projections, rotary embedding, rounding, write."""
