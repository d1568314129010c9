"""Find the replica that holds the prefix of a request, by hashes of text blocks of earlier requests.

The hash of a block covers all blocks before it, so two requests share exactly the blocks of their common prefix.
Answers are not hashed: the next request of a conversation contains them.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from ikcli.server.http.jsontext import dump

BLOCK = 128
"""Characters per block; a shorter rest is ignored."""
_MOST = 1 << 15  # blocks per replica, a million tokens: roughly the capacity of slots and prompts in RAM
_FIELDS = ("lora", "tools", "system", "instructions", "messages", "input", "prompt", "input_extra", "input_prefix")

_DATA = re.compile(r"[A-Za-z0-9+/=_-]{1024,}")
"""Data of an image, which is worth one block, not thousands."""

Blocks = tuple[int, ...]


def blocks_of(fields: Mapping[str, Any]) -> Blocks:
    """Return the blocks of a request's prompt, in the order of chat templates."""
    text = _DATA.sub(lambda found: str(hash(found[0])), "".join(_pieces(fields)))
    out, before = [], 0
    for i in range(0, len(text) - BLOCK + 1, BLOCK):
        before = hash((before, text[i : i + BLOCK]))
        out.append(before)
    return tuple(out)


def _pieces(fields: Mapping[str, Any]) -> Iterator[str]:
    for name in _FIELDS:
        value = fields.get(name)
        for item in value if isinstance(value, list) else () if value is None else (value,):
            yield item if isinstance(item, str) else dump(item) + "\n"


class PrefixIndex:
    """Blocks that a replica has computed.

    The least recently requested ones are evicted first, ends before beginnings.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def shared(self, blocks: Blocks) -> int:
        """Return how many leading blocks of a request the replica holds."""
        for n, block in enumerate(blocks):
            if block not in self._blocks:
                return n
        return len(blocks)

    def add(self, blocks: Blocks) -> None:
        """Add the blocks of a request sent to the replica."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all blocks after the process was replaced."""
        self._blocks.clear()
