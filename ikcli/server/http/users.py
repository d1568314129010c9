"""Users of a server: one key each, their permissions, and their usage. Only hashes of keys are kept.

Requests are POSTs. Tokens are those of prompts, cached ones included, and of answers, including answers whose client
left early. A day ends at midnight UTC. Usage is forgotten when the server ends.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikcli.errors import UsageError
from ikcli.log import warn
from ikcli.server.http.errors import ApiError
from ikcli.settings.values import toml_table

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.datastructures import Headers

ACCOUNT = "ik.account"
"""Key of a request's scope that holds the account the request is counted for."""
_KEYS = ("key", "sha256", "requests-per-minute", "tokens-per-day", "max-concurrent", "models")
_MINUTE, _DAY = 60.0, 86400


@dataclass(frozen=True, slots=True)
class User:
    """A user. `digest` is the SHA-256 of the key; a limit of 0 means none; empty `models` means all models."""

    name: str
    digest: bytes
    requests_per_minute: int = 0
    tokens_per_day: int = 0
    max_concurrent: int = 0
    models: tuple[str, ...] = ()


@dataclass(slots=True)
class Account:
    """Usage of a user."""

    user: User
    clock: Callable[[], float] = time.time
    n_requests: int = 0
    n_refused: int = 0
    n_prompt: int = 0
    n_predicted: int = 0
    n_running: int = 0
    _recent: deque[float] = field(default_factory=deque)
    _day: int = 0
    _today: int = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it runs. Raise ApiError 429 if a limit is reached."""
        try:
            self._check()
        except ApiError:
            self.n_refused += 1
            raise
        self._recent.append(self.clock())
        self.n_requests += 1
        self.n_running += 1
        try:
            yield
        finally:
            self.n_running -= 1

    def _check(self) -> None:
        user, now = self.user, self.clock()
        while self._recent and now - self._recent[0] >= _MINUTE:
            self._recent.popleft()
        if user.tokens_per_day and self.tokens_today() >= user.tokens_per_day:
            wait = _DAY - now % _DAY
            raise _too_many(f"the {user.tokens_per_day} tokens of {user.name} for this day are used up", wait)
        if user.requests_per_minute and len(self._recent) >= user.requests_per_minute:
            wait = _MINUTE - (now - self._recent[0])
            raise _too_many(f"{user.name} may make {user.requests_per_minute} requests per minute", wait)
        if user.max_concurrent and self.n_running >= user.max_concurrent:
            raise _too_many(f"{user.name} may have {user.max_concurrent} requests running at a time", 1)

    def check_model(self, names: Sequence[str]) -> None:
        """Raise ApiError 403 if the user may not use the model with these names."""
        if self.user.models and not set(names) & set(self.user.models):
            allowed = ", ".join(self.user.models)
            raise ApiError(403, f"{self.user.name} may not use the model {names[0]}, only {allowed}")

    def add(self, n_prompt: int, n_predicted: int) -> None:
        """Count tokens."""
        today = self.tokens_today()
        self.n_prompt += n_prompt
        self.n_predicted += n_predicted
        self._today = today + n_prompt + n_predicted

    def tokens_today(self) -> int:
        """Return the tokens used since midnight."""
        day = int(self.clock() // _DAY)
        if day != self._day:
            self._day, self._today = day, 0
        return self._today


def _too_many(message: str, wait: float) -> ApiError:
    seconds = max(math.ceil(wait), 1)
    return ApiError(429, f"{message}; try again in {seconds} s", headers={"Retry-After": str(seconds)})


class Users:
    """All accounts."""

    def __init__(self, users: Sequence[User] = ()) -> None:
        self.accounts = [Account(user) for user in users]

    def __bool__(self) -> bool:
        return bool(self.accounts)

    def find(self, headers: Headers) -> Account | None:
        """Return the account for the key of a request, or None. All keys are compared, in constant time."""
        digests = [hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in offered_keys(headers)]
        found = None
        for account in self.accounts:
            for digest in digests:
                if hmac.compare_digest(account.user.digest, digest):
                    found = account
        return found

    def collect(self, prefix: str) -> Iterator[Metric]:
        """Yield counters by user name."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, text, attribute in (
            ("user_requests", "Requests of a user.", "n_requests"),
            ("user_requests_refused", "Requests of a user beyond a limit.", "n_refused"),
            ("user_prompt_tokens", "Prompt tokens of a user.", "n_prompt"),
            ("user_tokens_predicted", "Generated tokens of a user.", "n_predicted"),
        ):
            counter = CounterMetricFamily(prefix + name, text, labels=["user"])
            for account in self.accounts:
                counter.add_metric([account.user.name], getattr(account, attribute))
            yield counter
        gauge = GaugeMetricFamily(prefix + "user_requests_processing", "Requests that run.", labels=["user"])
        for account in self.accounts:
            gauge.add_metric([account.user.name], account.n_running)
        yield gauge


def offered_keys(headers: Headers) -> list[str]:
    """Return the keys of a request: `Authorization: Bearer KEY` and `X-Api-Key: KEY`."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    offered = [headers.get("x-api-key", "")]
    if scheme.lower() == "bearer":
        offered.append(bearer.strip())
    return [text for text in offered if text]


def read_users(path: Path | None) -> Users:
    """Read the users of a TOML file, one table each. Raise UsageError naming the file and the key."""
    if path is None:
        return Users()
    table = toml_table(path)
    users = [_user(path, name, value) for name, value in table.items()]
    if path.stat().st_mode & 0o077 and any("key" in value for value in table.values()):
        warn(f"{path} holds keys and can be read by other users of this machine: chmod 600, or sha256 instead of key")
    if not users:
        raise UsageError(f"{path} names no user; it needs a table [NAME] with key = KEY")
    by_digest: dict[bytes, str] = {}
    for user in users:
        if user.digest in by_digest:
            raise UsageError(f"{path}: {user.name} has the same key as {by_digest[user.digest]}")
        by_digest[user.digest] = user.name
    return Users(users)


def _user(path: Path, name: str, value: Any) -> User:
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {name} must be a table, [{name}]")
    table = {key.replace("_", "-"): item for key, item in value.items()}
    for key in table:
        if key not in _KEYS:
            raise UsageError(f"{path}: unknown key {name}.{key}; there are {', '.join(_KEYS)}")
    models = table.get("models", [])
    if not isinstance(models, list) or not all(isinstance(model, str) and model for model in models):
        raise UsageError(f"{path}: {name}.models must be a list of names")
    return User(
        name,
        _digest(path, name, table),
        requests_per_minute=_limit(path, name, table, "requests-per-minute"),
        tokens_per_day=_limit(path, name, table, "tokens-per-day"),
        max_concurrent=_limit(path, name, table, "max-concurrent"),
        models=tuple(models),
    )


def _digest(path: Path, name: str, table: Mapping[str, Any]) -> bytes:
    key, digest = table.get("key"), table.get("sha256")
    if (key is None) == (digest is None):
        raise UsageError(f"{path}: {name} needs either key or sha256, the SHA-256 of its key in hexadecimal")
    if key is not None:
        if not isinstance(key, str) or not key.strip() or key != key.strip():
            raise UsageError(f"{path}: {name}.key must be a text without blanks around it")
        return hashlib.sha256(key.encode()).digest()
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise UsageError(f"{path}: {name}.sha256 must have 64 hexadecimal digits")
    return bytes.fromhex(digest)


def _limit(path: Path, name: str, table: Mapping[str, Any], key: str) -> int:
    value = table.get(key)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{path}: {name}.{key} must be a whole number from 1; without it nothing is limited")
    return value
