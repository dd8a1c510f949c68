"""Where a server listens: a TCP port, and a Unix socket for whoever runs it."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.errors import OpenError
from pipeline.types.places import user_path

BACKLOG = 128
UNSENT = 16 << 10  # bytes that the kernel keeps of what a reader has no room for; else megabytes
TRIED = 20  # ports after the one that was asked for
USUAL = 8080
OWN_FILES = 256  # held open beside the connections: saved states, weights, logs
OTHER_SOCKET = "Try another server.socket, in a folder of your own"


@contextlib.contextmanager
def listening(host: str, port: int, path: str | None) -> Iterator[list[socket.socket]]:
    """Bound sockets, the port's first. OpenError says why one cannot be had."""
    with contextlib.ExitStack() as stack:
        with _explained(f"{host}:{port}", lambda: _other_port(host, port)):
            listeners = [stack.enter_context(_tcp(host, port))]
            listeners[0].listen(BACKLOG)
        if path is not None:
            with _explained(path, lambda: OTHER_SOCKET):
                listeners.append(stack.enter_context(_unix(user_path(path))))
        yield listeners


def allow_files(connections: int) -> None:
    """Raise this process's soft limit of open files, 256 on macOS, to what so many connections need, as far as
    its hard one lets: a connection for which there is no file is dropped without a word."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OWN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def refuse_taken(host: str, port: int, path: str | None) -> None:
    """OpenError as from `listening`, without listening: nobody is let in who could not be served yet."""
    with _explained(f"{host}:{port}", lambda: _other_port(host, port)):
        _tcp(host, port).close()
    if path is not None:
        with _explained(path, lambda: OTHER_SOCKET):
            place = user_path(path)
            place.parent.stat()
            _refuse_what_is_not_stale(place)


@contextlib.contextmanager
def _explained(where: str, hint: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OpenError(f"cannot listen on {where}: {error}. {hint()}") from error


def _other_port(host: str, port: int) -> str:
    """One that is free, as it is typed; the host is wrong if there is none."""
    first = port + 1 if 1024 <= port < 65000 else USUAL  # lower ones are not for everybody
    for other in range(first, first + TRIED):
        with contextlib.suppress(OSError):
            _tcp(host, other).close()
            return f"Try: server.port={other}"
    return "Try another server.host"


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tcp(host: str, port: int) -> socket.socket:
    """Bound, and not listening yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol left open asyncio would not switch Nagle's delay off: 40 ms a reply.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _unix(path: Path) -> Iterator[socket.socket]:
    """A socket of mode 0600 at the path: made beside it and moved there, so that nobody ever finds it open to
    others, or half made. The end removes it, if it is still ours."""
    _refuse_what_is_not_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        listener.bind(str(new))
        os.chmod(new, 0o600)
        listener.listen(BACKLOG)
        os.replace(new, path)
        ours = os.lstat(path)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(path), ours):
                    path.unlink()


def _refuse_what_is_not_stale(path: Path) -> None:
    """Only a socket on which nobody listens may be replaced."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} is there and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)  # one whose queue is full is no stale one
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
    raise OSError(f"another server listens at {path}")
