"""Tables of the papers, for any model: `python -m benchmarks.papers.NAME --help`."""
