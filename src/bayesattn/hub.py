"""Whether the Hugging Face hub can be reached."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

# Seconds to wait for a connection.
TIMEOUT = 3.0


def hub_answers() -> bool:
    """Whether the hub, or the proxy in front of it, accepts a connection.

    One short try: the libraries that load from the hub would retry for half a minute.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT)
    proxies = {} if proxy_bypass(host.hostname or "") else getproxies()
    if proxy := proxies.get(host.scheme) or proxies.get("all"):
        host = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    try:
        socket.create_connection((host.hostname or "", host.port or 443), timeout=TIMEOUT).close()
    except OSError:
        return False
    return True
