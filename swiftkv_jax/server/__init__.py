"""An OpenAI-compatible API over the engine, with limits, API keys and one format for every error."""
