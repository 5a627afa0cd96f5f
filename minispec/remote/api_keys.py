"""API keys. A key is sent to one server only, and only from a variable that the user named."""

import os

from minispec.cli import UserError, note
from minispec.remote.client import Server
from minispec.remote.transport import is_local


def keys_in(variables: list[str], servers: int) -> list[str]:
    """Read the keys from these environment variables, at most one per server."""
    if len(variables) > servers:
        raise UserError(f"--key-env names {len(variables)} variables for {servers} servers")
    keys = [os.environ.get(name, "").strip() for name in variables]
    for i, key in enumerate(keys, start=1):
        if not (key and key.isascii() and key.isprintable()):  # its name may be a key
            raise UserError(f"--key-env: variable {i} is not set or does not hold a key")
    return keys


def warn_if_exposed(server: Server) -> None:
    """Warn if others on the network could read the key."""
    address = server.http.base_url
    if server.key and address.scheme == "http" and not is_local(address.host):
        note(f"the key is sent to {server.url} unencrypted and can be read in transit; use https")
