"""Keys and values of tokens written into the pages they belong in."""
