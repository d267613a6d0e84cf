"""OpenAI's API over the engine: bounded, keyed, and with one shape for every error."""
