"""Keys of servers. A key goes to one server, and only if the user named the variable it is in."""

import ipaddress
import os

from minispec.certify.others.client import Server
from minispec.errors import UserError, note


def keys_in(variables: list[str], servers: int) -> list[str]:
    """The keys in these environment variables, one for each server, or fewer."""
    if len(variables) > servers:
        raise UserError(f"--key-env names {len(variables)} variables for {servers} servers")
    keys = [os.environ.get(name, "").strip() for name in variables]
    for i, key in enumerate(keys, start=1):
        if not (key and key.isascii() and key.isprintable()):  # the name may be a key: keep it out
            raise UserError(f"--key-env: variable {i} is not set, or what it holds is not a key")
    return keys


def warn_if_exposed(server: Server) -> None:
    """Say so if others on the network can read the key on its way."""
    address = server.http.base_url
    if server.key and address.scheme == "http" and not is_loopback(address.host):
        note(f"the key goes to {server.url} unencrypted, for anyone on the way to read: use https")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
