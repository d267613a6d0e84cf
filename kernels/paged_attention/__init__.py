"""Grouped-query attention over keys and values in pages."""
