"""Bytes of images that requests name: base64, `data:` URLs, files below a folder, and addresses on the web.

Addresses are loaded only with `--media-remote`, and then only from public networks unless `--media-private` allows
others: the server resolves a name once and connects to the address that it checked, after redirections too.
"""

from __future__ import annotations

import binascii
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import time
from pathlib import Path
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from ikcli.errors import IkError, UsageError
from ikcli.settings.vision import VisionConfig

MAX_BYTES = 32 << 20
"""Maximum size of an encoded image."""
_MAX_REDIRECTS = 3
_SECONDS = 30.0
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_SHOWN = 80
_CAREFUL = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


class MediaError(IkError):
    """An image that cannot be loaded; the message continues the path of the field."""


class Media:
    """Loader of images; raises MediaError with one sentence if an image cannot be loaded."""

    def __init__(self, config: VisionConfig, *, seconds: float = _SECONDS, max_bytes: int = MAX_BYTES) -> None:
        """Prepare loading. Raise UsageError if `--media-path` is not a folder."""
        self._remote, self._private = config.media_remote, config.media_private
        self._seconds, self._max_bytes = seconds, max_bytes
        self._root: Path | None = None
        if config.media_path is not None:
            self._root = config.media_path.resolve()
            if not self._root.is_dir():
                raise UsageError(f"--media-path {config.media_path} is not a folder")

    def load(self, source: str) -> bytes:
        """Return the bytes of an image; `source` is a URL or base64."""
        scheme = _scheme(source)
        if scheme == "data":
            return self._data_url(source)
        if scheme in ("http", "https"):
            return self._web(source)
        if scheme == "file":
            return self._file(source)
        if scheme:
            raise MediaError(f"{scheme}: addresses are not supported; send a data: URL or base64")
        return self._base64(source)

    def _base64(self, text: str) -> bytes:
        if len(text) > self._max_bytes // 3 * 4 + 4:
            raise self._too_large()
        try:
            text = "".join(text.split()).replace("-", "+").replace("_", "/").rstrip("=")
            return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
        except (ValueError, binascii.Error):
            raise MediaError("expected the base64 data or the data: URL of an image, but it is not base64") from None

    def _data_url(self, url: str) -> bytes:
        head, comma, data = url.partition(",")
        if not comma:
            raise MediaError("the data: URL has no comma before its data")
        if head.lower().endswith(";base64"):
            return self._base64(unquote(data) if "%" in data else data)
        if len(data) > 3 * self._max_bytes:
            raise self._too_large()
        return unquote_to_bytes(data)

    # --- files ------------------------------------------------------------------------------------------------------
    def _file(self, url: str) -> bytes:
        if self._root is None:
            raise MediaError("file: URLs are off; start the server with --media-path DIR to allow those below a folder")
        name = unquote(url[len("file:") :].removeprefix("//"))
        if name.startswith("localhost/"):
            name = name.removeprefix("localhost")
        if not name or "\0" in name:
            raise MediaError("the file: URL names no file")
        for path in (Path(name), self._root / name.lstrip("/")):
            try:
                found = path.resolve(strict=True)
            except (OSError, RuntimeError, ValueError):
                continue
            if path.is_absolute() and found.is_relative_to(self._root):
                return self._read(found, name)
        raise MediaError(f"{_short(name)} does not exist below the folder of --media-path")

    def _read(self, path: Path, name: str) -> bytes:
        try:
            file = os.open(path, os.O_RDONLY | _CAREFUL)
            with open(file, "rb") as f:
                about = os.fstat(f.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise MediaError(f"{_short(name)} is not a file")
                if about.st_size > self._max_bytes:
                    raise self._too_large()
                return f.read(self._max_bytes)
        except OSError as e:
            raise MediaError(f"{_short(name)} cannot be read: {e.strerror or e}") from None

    # --- the web ----------------------------------------------------------------------------------------------------
    def _web(self, url: str) -> bytes:
        if not self._remote:
            raise MediaError("http(s) addresses are off; start the server with --media-remote, or send a data: URL")
        until = time.monotonic() + self._seconds
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                data, target = self._get(url, until)
                if target is None:
                    return data
                url = urljoin(url, target)
        except MediaError:
            raise
        except TimeoutError:
            raise MediaError(f"{_short(url)} did not answer within {self._seconds:g} seconds") from None
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise MediaError(f"{_short(url)} cannot be loaded: {getattr(e, 'strerror', None) or e}") from None
        raise MediaError(f"the address redirects more than {_MAX_REDIRECTS} times")

    def _get(self, url: str, until: float) -> tuple[bytes, str | None]:
        """Return the content of an address, or where it redirects to."""
        at = urlsplit(url)
        if at.scheme not in ("http", "https") or not at.hostname:
            raise MediaError(f"{_short(url)} is not an http(s) address")
        connection = self._connection(at, until)
        try:
            target = (at.path or "/") + (f"?{at.query}" if at.query else "")
            connection.request(
                "GET", target, headers={"Accept": "image/*", "User-Agent": "ik", "Host": at.netloc.rpartition("@")[2]}
            )
            response = connection.getresponse()
            where = response.getheader("Location")
            if response.status in _REDIRECTS and where:
                return b"", where
            if response.status != 200:
                raise MediaError(f"{_short(url)} answers with status {response.status}")
            declared = response.getheader("Content-Length") or ""
            if declared.isdigit() and int(declared) > self._max_bytes:
                raise self._too_large()
            return self._body(response, connection, until), None
        finally:
            connection.close()

    def _body(self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection, until: float) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            if connection.sock is not None:
                connection.sock.settimeout(_left(until))
            part = response.read1(_CHUNK)
            if not part:
                return b"".join(parts)
            _left(until)
            size += len(part)
            if size > self._max_bytes:
                raise self._too_large()
            parts.append(part)

    def _connection(self, at: SplitResult, until: float) -> http.client.HTTPConnection:
        """Return a connection to an address that was checked."""
        host = at.hostname or ""
        port = at.port or (443 if at.scheme == "https" else 80)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(item[4][0]) for item in found))
        if not self._private and not all(_is_public(address) for address in addresses):
            raise MediaError(f"{_short(host)} is an address of a private network; --media-private allows those")
        connection = http.client.HTTPConnection(host, port, timeout=_left(until))
        sock = socket.create_connection((addresses[0], port), timeout=_left(until))
        try:
            if at.scheme == "https":
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise
        connection.sock = sock
        return connection

    def _too_large(self) -> MediaError:
        return MediaError(f"the image has more than {self._max_bytes >> 20} MiB")


def is_inline(source: str) -> bool:
    """Return whether a source holds the image itself: base64, or a `data:` URL."""
    return _scheme(source) in ("", "data")


def _scheme(source: str) -> str:
    return source[:8].partition(":")[0].lower() if ":" in source[:8] else ""


def _is_public(address: str) -> bool:
    """Return whether an address belongs to the internet, also where IPv6 carries an IPv4 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return inner.is_global
    return ip.is_global and not ip.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _left(until: float) -> float:
    """Return the seconds left; raise TimeoutError if there are none."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
