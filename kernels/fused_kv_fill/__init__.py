"""From the stream to the pages in one pass: norm, projections, rotary embedding, rounding, the write."""
