"""Generate text on a server with OpenAI's completions API: the client, and whether it serves our
model. Used by `certify --server` and `distill generate --server`."""
