"""The engine: requests in, tokens out; offline here, behind a server later."""
