"""Black-box tests of other decoders: a Python function or a server."""
