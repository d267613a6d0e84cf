"""Slim attention by measurement: what storing keys alone costs a model, row by row, and which rows pay."""
