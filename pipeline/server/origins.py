"""What keeps web pages out. A page in somebody's browser can ask any address that the browser reaches: this
server's own, too, under a name of the page's that points here (DNS rebinding)."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers

from pipeline.errors import RequestError
from pipeline.server.settings import is_loopback


class Origins:
    """Which names the server may be asked by, and which pages may ask it."""

    def __init__(self, host: str, hosts: Collection[str], cors: Collection[str]):
        self._any_host = not hosts and not is_loopback(host)
        self._hosts, self._cors = {name.lower() for name in hosts}, frozenset(cors)

    def check(self, headers: Headers) -> None:
        """RequestError 403 for a request that a page should not have been able to send. Browsers put `Host`
        into every request, `Origin` into each that could change something; other clients may not."""
        host = headers.get("host", "").lower()
        if host and not self._known(_name(host)):
            hint = (
                "The server is not known by this name. Its operator may add it: server.hosts=[NAME]"
            )
            raise RequestError(f"Host: {hint}", param="Host", code="forbidden_host", status=403)
        origin = headers.get("origin")
        if origin is not None and not self._welcome(origin, host):
            hint = (
                "Pages of this origin may not ask. The operator may let them: server.cors=[ORIGIN]"
            )
            raise RequestError(
                f"Origin: {hint}", param="Origin", code="forbidden_origin", status=403
            )

    def _known(self, name: str) -> bool:
        return self._any_host or name in self._hosts or is_loopback(name)

    def _welcome(self, origin: str, host: str) -> bool:
        own = origin.lower().partition("://")[2] == host
        return own or origin in self._cors or "*" in self._cors


def _name(host: str) -> str:
    """Without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
