"""Conversations on disk: the caches of slots as files (see `slot_file`), found again by their tokens.

A file belongs to a model, its cache layout and the settings that change what is cached. Other files in the folder stay
untouched but count for its limit. A separate thread writes files from copies, so computing continues meanwhile. A file
is removed when a newer one continues its text. Above the limit, the least recently used files are removed, whichever
server wrote them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path

from ikcli.engine.run.adapters import NOTHING, Added
from ikcli.engine.run.saved_sequence import Checkpoint, SavedSequence
from ikcli.engine.run.session import Session
from ikcli.files import make_private_folder
from ikcli.server.prefix.keys import Tokens, common_prefix
from ikcli.server.slots import slot_file
from ikcli.server.slots.log import Logger
from ikcli.server.slots.states import EngineError

SUFFIX = ".session"
_MOST_WAITING = 4  # copies that wait to be written


@dataclass(frozen=True, slots=True)
class Entry:
    """The first len(tokens) cached positions of a slot, computed with the additions `added`."""

    tokens: Tokens
    saved: SavedSequence
    added: Added = NOTHING

    def shared(self, tokens: Tokens, added: Added = NOTHING) -> int:
        """Return the number of tokens of a text that this entry saves."""
        if added != self.added:
            return 0
        return self.saved.reach(common_prefix(self.tokens, tokens))


@dataclass(frozen=True, slots=True)
class Stored:
    """A file; `entry` has everything needed to judge its use, without the cache itself."""

    path: Path
    entry: Entry


class Sessions:
    """The saved conversations of a session; see the module. All but the writing runs in the engine's thread."""

    def __init__(self, session: Session, folder: Path, limit: int, n_ctx: int, log: Logger) -> None:
        """List the files. `limit` in bytes; `n_ctx` tokens that a slot takes."""
        make_private_folder(folder, "--sessions")
        self._session, self._folder, self._limit, self._n_ctx, self._log = session, folder, limit, n_ctx, log
        self._about = slot_file.about(session)
        self._lock = threading.Lock()  # of the list
        self._stored: list[Stored] = []
        self._find()
        self._jobs: queue.Queue[tuple[list[slot_file.Part], Stored] | None] = queue.Queue(_MOST_WAITING)
        self._writer = threading.Thread(target=self._write_all, name="ik-sessions", daemon=True)
        self._writer.start()
        log("INFO", "init", f"sessions: {len(self._stored)} of this model in {folder}, limit {limit >> 20} MiB",
            {"folder": str(folder), "n_sessions": len(self._stored)})  # fmt: skip

    def _find(self) -> None:
        """List the files that fit this session."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            found = slot_file.head(path)
            if found is None or any(found[0].get(name) != value for name, value in self._about.items()):
                continue
            header, tokens = found
            if len(tokens) != header["n_tokens"] or len(tokens) > self._n_ctx:
                continue
            checkpoints = tuple(Checkpoint(n, (), first) for n, first in header["checkpoints"])
            kind = self._session.sequences.kind
            saved = SavedSequence(len(tokens), (), checkpoints, kind, header["first"])
            self._stored.append(Stored(path, Entry(tokens, saved, header["added"])))

    def __len__(self) -> int:
        return len(self._stored)

    # --- find -------------------------------------------------------------------------------------------------------
    def has(self, tokens: Tokens, added: Added) -> bool:
        """Return whether a file begins with all of these tokens."""
        with self._lock:
            return any(one.entry.shared(tokens, added) == len(tokens) for one in self._stored)

    def best(self, prompt: Tokens, more_than: int, added: Added) -> tuple[SavedSequence, Tokens, int] | None:
        """Return the stored sequence that shares most tokens with the prompt, more than `more_than`.

        The result has the sequence, its tokens and the number of shared tokens.
        """
        while True:
            with self._lock:
                found = max(self._stored, key=lambda one: one.entry.shared(prompt, added), default=None)
            n = found.entry.shared(prompt, added) if found is not None else 0
            if found is None or n <= more_than:
                return None
            try:
                tokens, saved, _ = slot_file.load(self._session, found.path, self._n_ctx, added)
            except EngineError as e:  # a file that failed is not tried again
                self._forget(found)
                if "damaged" in e.message:
                    found.path.unlink(missing_ok=True)
                self._log("WARN", "sessions", "session not used", {"file": found.path.name, "error": e.message})
                continue
            with contextlib.suppress(OSError):
                os.utime(found.path)
            self._log("INFO", "sessions", "session loaded", {"file": found.path.name, "n_tokens": n})
            return saved, tokens, n

    def _forget(self, stored: Stored) -> None:
        with self._lock:
            self._stored = [one for one in self._stored if one.path != stored.path]

    # --- store ------------------------------------------------------------------------------------------------------
    def keep(self, entry: Entry, *, wait: bool = False) -> bool:
        """Queue an entry for writing; return False if too many wait for that already, unless this may `wait`."""
        shell = SavedSequence(
            entry.saved.n_tokens, (), tuple(Checkpoint(c.n_tokens, (), c.first) for c in entry.saved.checkpoints),
            entry.saved.kind, entry.saved.first,
        )  # fmt: skip
        name = hashlib.sha256(entry.tokens.astype("<i4").tobytes() + repr((self._about, entry.added)).encode())
        stored = Stored(self._folder / (name.hexdigest()[:32] + SUFFIX), Entry(entry.tokens, shell, entry.added))
        parts = slot_file.encode(self._session, entry.tokens, entry.saved, entry.added, self._about)
        try:
            self._jobs.put((parts, stored), block=wait)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Wait until everything is written."""
        self._jobs.put(None)
        self._writer.join()

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            parts, stored = job
            try:
                n_bytes = slot_file.write(parts, stored.path)
            except EngineError as e:
                self._log("WARN", "sessions", "session not saved", {"file": stored.path.name, "error": e.message})
                continue
            self._log("INFO", "sessions", "session saved", {
                "file": stored.path.name, "n_tokens": len(stored.entry.tokens), "n_bytes": n_bytes,
            })  # fmt: skip
            self._add(stored)
            self._make_room(stored.path)

    def _add(self, stored: Stored) -> None:
        """List a file in place of those whose text it continues."""
        entry = stored.entry
        with self._lock:
            others = [one for one in self._stored if one.path != stored.path]
            old = [one for one in others if entry.shared(one.entry.tokens, one.entry.added) == len(one.entry.tokens)]
            self._stored = [*(one for one in others if one not in old), stored]
        for one in old:
            with contextlib.suppress(OSError):
                one.path.unlink()

    def _make_room(self, newest: Path) -> None:
        """Remove the least recently used files until all are within the limit."""
        files = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                about = path.stat()
                files.append((path != newest, -about.st_mtime_ns, about.st_size, path))
        total = 0
        for _, _, size, path in sorted(files):
            total += size
            if total > self._limit:
                with contextlib.suppress(OSError):
                    path.unlink()
        with self._lock:
            self._stored = [one for one in self._stored if one.path.exists()]
