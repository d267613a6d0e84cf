"""Writing of tokens' keys and values into their pages."""
