"""Whether the Hugging Face hub can be reached."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

# Seconds to wait before it is taken to be out of reach.
PATIENCE = 3.0


def hub_answers() -> bool:
    """Asked once, quickly; the libraries that load from it would go on trying for half a minute.

    Behind a proxy it is the proxy that is asked.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT)
    proxies = {} if proxy_bypass(host.hostname or "") else getproxies()
    if proxy := proxies.get(host.scheme) or proxies.get("all"):
        host = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    try:
        socket.create_connection((host.hostname or "", host.port or 443), timeout=PATIENCE).close()
    except OSError:
        return False
    return True
