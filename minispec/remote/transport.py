"""The connection to a server: direct, or through the proxy that the environment names."""

import ipaddress
import os
from urllib.request import getproxies, proxy_bypass

import httpx

from minispec.cli import UserError


def is_local(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified  # 0.0.0.0, which many servers print
    except ValueError:
        return host == "localhost"


def find_proxy(address: httpx.URL) -> tuple[str | None, str | None]:
    """Return the variable that names the proxy for a server, and the proxy's address. A server on
    this machine has none."""
    hosts = address.host, address.netloc.decode()  # NO_PROXY may name a port
    if not (is_local(address.host) or any(map(proxy_bypass, hosts))):
        for scheme in address.scheme, "all":
            if proxy := getproxies().get(scheme):
                return f"{scheme.upper()}_PROXY", proxy if "://" in proxy else f"http://{proxy}"
    return None, None


def make_transport(
    address: httpx.URL, connections: int
) -> tuple[httpx.HTTPTransport, str | None]:
    """Return the transport to a server, and the variable that names its proxy, if there is one.
    Raises UserError if a variable is wrong."""
    variable, proxy = find_proxy(address)
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    encrypted = address.scheme == "https"  # otherwise no certificates are read
    try:
        return httpx.HTTPTransport(verify=encrypted, limits=limits, proxy=proxy), variable
    except OSError as error:
        name = next(filter(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")), "certificates")
        path = os.environ.get(name, "")
        raise UserError(f"{name} {path} cannot be read: {error.strerror or error}") from None
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise UserError(
            f"{variable}: {error}; correct it, or add {address.host} to NO_PROXY"
        ) from None
