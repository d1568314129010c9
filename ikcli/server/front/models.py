"""Several models: load on demand within the memory budget, evict the least recently used.

A model is unloaded once its running requests are done. Requests that arrive meanwhile wait, then load it again. A model
is loaded once, however many requests wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ikcli.server.front.child import Child
from ikcli.server.front.models_entries import ModelEntry, ModelsFile
from ikcli.server.front.models_events import Events
from ikcli.server.front.models_instance import KEPT, SLEEPING, UNLOADED, Instance
from ikcli.server.front.process import LoadError
from ikcli.server.front.supervisor import DOWN, DRAINING, READY, STARTING, ProcessSupervisor
from ikcli.server.http.errors import ApiError, bad_request
from ikcli.server.http.logs import ServerLog

ChildMaker = Callable[[ModelEntry, Path], Child]


@dataclass(frozen=True, slots=True)
class ModelUse:
    """How a request uses a model. `counts`: the request makes the model the most recently used one.

    Without `loads`, a model that is not loaded is an error, but a sleeping one is woken.
    """

    model: str
    counts: bool = True
    loads: bool = True


class ModelSupervisor(ProcessSupervisor[Instance, ModelUse]):
    """Supervisor of one process per loaded model. `folder` is the directory of the sockets."""

    def __init__(self, file: ModelsFile, make_child: ChildMaker, folder: Path, log: ServerLog) -> None:
        self.file = file
        self.instances = {name: Instance(entry) for name, entry in file.entries.items()}
        self.events = Events()
        self._leaving: list[Instance] = []
        super().__init__(log, "router")
        self._make_child, self._folder = make_child, folder
        self._room = asyncio.Lock()
        self._n_children = 0

    # --- use --------------------------------------------------------------------------------------------------------
    async def _pick(self, hint: ModelUse) -> Instance:
        """Return the model, loading it if necessary. Raise ApiError if that fails."""
        name = hint.model
        while (instance := self.instance(name)).state != READY:
            await self._until(lambda: instance.state != DRAINING)
            if not hint.loads and instance.status == UNLOADED:
                raise bad_request(
                    f"model {name} is not loaded; load it with POST /models/load, or add ?autoload=true to the request"
                )
            await self.load(name)
        return instance

    def _touch(self, one: Instance, hint: ModelUse, *, begins: bool) -> None:
        """Count both ends of a request: a model that has just finished a long answer has been used just now."""
        if hint.counts:
            one.used = time.monotonic()

    def instance(self, name: str) -> Instance:
        """Return a model by its name. Raise ApiError 404 if it was removed."""
        if name not in self.instances:
            raise ApiError(404, f"model '{name[:100]}' is not served any more")
        return self.instances[name]

    def keep(self, name: str, seconds: float) -> None:
        """Set for how many seconds an idle model stays loaded this time; negative means forever."""
        self.instance(name).ttl = seconds if seconds >= 0 else None

    async def load(self, name: str) -> None:
        """Load a model and the rest of its group, if they are not loaded. Raise ApiError if that fails."""
        instance = self.instance(name)
        await self._until(lambda: instance.state != DRAINING)
        self._check_open()
        for one in self._with_partners(self.instance(name)):
            if one.state == DOWN:
                one.state, one.failure = STARTING, None
                self._tell(one)
                self._spawn(self._load(one))
        await self._until(lambda: instance.state != STARTING)
        if instance.failure is not None:
            raise instance.failure

    async def unload(self, name: str) -> None:
        """Unload a model and the rest of its group once their requests are done."""
        instances = self._with_partners(self.instance(name))
        await self._unload_all(instances)
        for one in instances:
            if one.status == SLEEPING:
                one.asleep, one.kept = False, {}
                self._tell(one)

    async def _unload_all(self, instances: Iterable[Instance]) -> None:
        await asyncio.gather(*map(self._unload, instances))

    def _with_partners(self, instance: Instance) -> list[Instance]:
        names = self.file.partners(instance.entry.name, together=True)
        return [instance, *(self.instances[name] for name in names)]

    def members(self) -> list[Instance]:
        """Return all models, including removed ones whose processes are still ending; see ProcessSupervisor."""
        return [*self.instances.values(), *self._leaving]

    def _tell(self, instance: Instance, **more: Any) -> None:
        """Send listeners the new status."""
        data: dict[str, Any] = {"status": instance.status, **more}
        if instance.failure is not None:
            data |= {"failed": True, "error": instance.failure.message, "exit_code": instance.exit_code}
        self.events.send(instance.entry.name, "model_status", data)

    # --- changes of the list ------------------------------------------------------------------------------------------
    def update(self, file: ModelsFile) -> None:
        """Replace the list of models; unload those that were removed or changed."""
        before, self.file = self.instances, file
        self.instances = {}
        for name, entry in file.entries.items():
            old = before.get(name)
            if old is not None and old.entry.like(entry):
                old.ttl = (entry.ttl or None) if old.entry.ttl != entry.ttl else old.ttl
                old.entry = entry
                self.instances[name] = old
            else:
                self.instances[name] = Instance(entry)
        for name, old in before.items():
            if self.instances.get(name) is not old:
                self._leaving.append(old)
                self._spawn(self._leave(old))
            if name not in self.instances:
                self.events.send(name, "model_remove")
        self.events.send("*", "models_reload")

    async def remove(self, name: str) -> None:
        """Remove a model from the list and wait until its process has ended."""
        one = self.instances[name]
        self.file = replace(self.file, entries={key: e for key, e in self.file.entries.items() if key != name})
        self.instances = {key: other for key, other in self.instances.items() if key != name}
        self._leaving.append(one)
        await self._leave(one)
        self.events.send(name, "model_remove")

    async def _leave(self, instance: Instance) -> None:
        """Keep a removed model a member until its process has ended, so that no process is left behind."""
        await self._unload(instance)
        self._leaving.remove(instance)
        await self._notify()

    # --- loading ----------------------------------------------------------------------------------------------------
    async def _load(self, instance: Instance) -> None:
        name = instance.entry.name
        self._log.info("router", "loading model", model=name)
        try:
            async with self._room:
                await self._make_room(instance)
                instance.holds_memory = True
            self._check_open()
            self._n_children += 1
            child = self._make_child(instance.entry, self._folder / f"{name_of_file(name)}-{self._n_children}.sock")
            await self._start(instance, child)
            instance.info = await child.described()
        except (LoadError, OSError) as e:
            await self._failed(instance, ApiError(500, f"model {name} could not be loaded: {e}"))
            return
        except ApiError as e:
            await self._failed(instance, e)
            return
        except BaseException:
            if instance.process is not None:
                instance.process.kill()
                await instance.process.stop()
            await self._failed(instance, ApiError(503, "The server is shutting down"))
            raise
        instance.state, instance.used, instance.ttl = READY, time.monotonic(), instance.entry.ttl or None
        woken, instance.asleep, instance.kept = instance.asleep, False, {}
        self._tell(instance, **({} if woken or not instance.info else {"info": instance.info["model"]}))
        self._log.info("router", "model loaded", model=name)
        self._spawn(self._watch(instance, child))
        await self._notify()

    async def _failed(self, instance: Instance, error: ApiError) -> None:
        instance.exit_code = instance.process.exit_code if instance.process is not None else None
        instance.state, instance.process, instance.holds_memory, instance.failure = DOWN, None, False, error
        instance.asleep, instance.kept = False, {}
        self._tell(instance)
        self._log.error("router", "model not loaded", model=instance.entry.name, error=error.message)
        await self._notify()

    async def _watch(self, instance: Instance, child: Child) -> None:
        """Note an unexpected end of a process, so that the next request loads its model again."""
        await child.wait()
        if instance.process is child and instance.state == READY:
            await self._failed(instance, ApiError(502, f"model {instance.entry.name}: {child.last_words()}"))

    async def _make_room(self, instance: Instance) -> None:
        """Unload models that exclude this one, then the least recently used, until memory and the maximum allow it."""
        excluded = {self.instances[name] for name in self.file.partners(instance.entry.name, together=False)}
        belonging = self._with_partners(instance)
        while True:
            self._check_open()
            holding = [one for one in self.members() if one.holds_memory and one not in belonging]
            many = self.file.max and len(holding) + len(belonging) > self.file.max
            if not excluded.intersection(holding) and not many and not self.short(instance):
                return
            wanted = [one for one in holding if one in excluded] or holding
            if not wanted:
                if not any(one.holds_memory for one in belonging):  # try it alone: the memory plan is conservative
                    return
                raise ApiError(503, f"model {instance.entry.name}: it does not fit beside the rest of its group")
            loaded = [one for one in wanted if one.state == READY]
            if loaded:
                oldest = min(loaded, key=lambda one: (one.n_running > 0, one.used))
                await self._unload_all(self._with_partners(oldest))
            else:
                await self._until(partial(_any_changed, [(one, one.state) for one in wanted]))

    def short(self, instance: Instance) -> dict[str, int]:
        """Return, by device, the missing bytes: those that a model needs beyond what the loaded ones leave free."""
        found = {}
        for device, limit in self.file.budget.items():
            taken = sum(one.entry.need.get(device, 0) for one in self.members() if one.holds_memory)
            missing = taken + instance.entry.need.get(device, 0) - limit
            if instance.entry.need.get(device, 0) and missing > 0:
                found[device] = missing
        return found

    async def _unload(self, instance: Instance) -> None:
        await self._until(lambda: instance.state != STARTING)
        child = instance.process
        if instance.state == READY and child is not None:
            instance.state = DRAINING
            self._log.info("router", "unloading model", model=instance.entry.name)
            try:
                async with asyncio.timeout(instance.entry.stop_timeout):
                    await self._until(lambda: not instance.n_running)
            except TimeoutError:
                self._log.warn("router", "requests are cut off: stop-timeout", model=instance.entry.name)
                child.kill()
            await self._stop(instance)
        await self._until(lambda: instance.state != DRAINING)

    async def _stop(self, instance: Instance) -> None:
        child = instance.process
        if child is not None:
            await child.stop()
        instance.state, instance.process, instance.holds_memory = DOWN, None, False
        self._tell(instance)
        await self._notify()

    # --- the life of all ---------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Preload models and unload idle ones."""
        await asyncio.gather(self.preload(), self.watch_ttl())

    async def preload(self) -> None:
        """Load the models with `preload` and log failures."""
        wanted = [name for name, entry in self.file.entries.items() if entry.preload]
        await asyncio.gather(*(self.load(name) for name in wanted), return_exceptions=True)

    async def watch_ttl(self) -> None:
        """Unload models that were idle for their TTL, with the rest of their group."""
        while True:
            await asyncio.sleep(0.25)
            for instance in self.instances.values():
                belonging = self._with_partners(instance)
                if instance.state != READY or not all(map(self._expired, belonging)):
                    continue
                self._log.info("router", "model was not used for its ttl", model=instance.entry.name)
                kept = [await self._last_answers(one) for one in belonging]
                if all(map(self._expired, belonging)):  # still idle
                    for one, answers in zip(belonging, kept, strict=True):
                        one.asleep, one.kept = bool(answers), answers
                    await self._unload_all(belonging)

    async def _last_answers(self, instance: Instance) -> dict[bytes, tuple[int, bytes]]:
        """Return the answers to keep of a model that falls asleep; empty if it is only unloaded."""
        child, entry = instance.process, instance.entry
        if child is None or instance.state != READY or not entry.sleeps or instance.ttl != entry.ttl:
            return {}
        return {target: found for target in KEPT if (found := await child.answer(target))}

    def _expired(self, instance: Instance) -> bool:
        ttl = instance.ttl
        if instance.state != READY:
            return instance.state == DOWN
        return ttl is not None and not instance.n_running and time.monotonic() - instance.used >= ttl

    async def close(self) -> None:
        """See ProcessSupervisor."""
        await super().close()
        await asyncio.gather(*(self._stop(one) for one in self.members() if one.process is not None))


def _any_changed(before: list[tuple[Instance, str]]) -> bool:
    return any(one.state != state for one, state in before)


def name_of_file(name: str) -> str:
    """Return a short plain name for a model's files."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:20]
