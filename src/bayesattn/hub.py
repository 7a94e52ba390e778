"""Whether the Hugging Face hub can be reached."""

from __future__ import annotations

import socket
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

# Seconds to wait for a connection.
TIMEOUT = 3.0
# Ports of addresses that name none.
PORTS = {"http": 80, "https": 443, "socks4": 1080, "socks5": 1080, "socks5h": 1080}


def hub_answers() -> bool:
    """Whether the hub, or the proxy in front of it, accepts a connection; never with HF_HUB_OFFLINE.

    One short try: the libraries that load from the hub would retry for half a minute.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        host = urlsplit(constants.ENDPOINT)
        proxies = {} if proxy_bypass(host.hostname or "") else getproxies()
        if proxy := proxies.get(host.scheme) or proxies.get("all"):
            host = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
        socket.create_connection((host.hostname or "", _port(host)), timeout=TIMEOUT).close()
    except (OSError, ValueError):  # an address that cannot be read is a ValueError
        return False
    return True


def _port(address: SplitResult) -> int:
    return address.port or PORTS.get(address.scheme, 443)
