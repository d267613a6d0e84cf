"""SwiftKV and its relatives in JAX: cheaper prompts, smaller caches, distilled and served in one place."""
