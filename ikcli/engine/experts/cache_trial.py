"""Decide by the times of steps whether an expert cache is used.

Some steps run without the cache, then windows of steps with it. When the median step of a window is slower than
without, the cache is left alone for a while, each time twice as long. Steps without it are repeated now and then,
because they change with the number of cached positions and with what else the machine does.
"""

from __future__ import annotations

from statistics import median

PLAIN, WINDOW = 8, 32  # steps without the cache, and of one judgement of it
AGAIN = 8  # windows after which steps without it are measured again
PATIENCE = 4  # windows in which a cache that fills may be slower by SLACK
SLACK = 1.02
PAUSE = 512  # steps without the cache after the first defeat


class CacheTrial:
    """The times of steps of one token, and what follows from them."""

    def __init__(self) -> None:
        self.on = False  # the next step uses the cache
        self.plain, self.cached = 0.0, 0.0  # seconds of a step without the cache and with it: the last medians
        self.pause = 0  # steps left without the cache and without measuring
        self.defeats = 0
        self._times: list[float] = []
        self._windows, self._since = 0, 0  # with the cache: since steps without it, since the last defeat

    def saw(self, used: bool, seconds: float) -> bool:
        """Count a step, unless it ran otherwise than planned; return whether the cache was defeated by it."""
        if used != self.on:
            return False
        if self.pause:
            self.pause -= 1
            return False
        self._times.append(seconds)
        if len(self._times) < (WINDOW if self.on else PLAIN):
            return False
        found, self._times = median(self._times), []
        if not self.on:
            self.plain, self.on, self._windows = found, True, 0
            return False
        self.cached = found
        self._windows += 1
        self._since += 1
        if found > self.plain * (SLACK if self._since < PATIENCE else 1.0):
            self.pause = PAUSE << min(self.defeats, 8)
            self.defeats += 1
            self.on, self._since = False, 0
            return True
        self.on = self._windows < AGAIN
        return False
