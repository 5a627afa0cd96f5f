"""Decoders that are not ours, examined from outside: a function or a server."""
