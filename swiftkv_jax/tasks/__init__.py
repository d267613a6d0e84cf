"""Public evaluations by generation and by likelihood: items, checkers, scores. No model is known here."""
