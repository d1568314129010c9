"""What replicas use of Ray, without it: nodes with processors, actors that live in this process and die with a node."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """An actor is gone."""


@dataclass(eq=False)
class Node:
    cpus: int
    kind: str = ""
    gpus: int = 0
    actors: list[Actor] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.cpus - sum(actor.cpus for actor in self.actors)


class Actor:
    """A handle; its methods are called when it has a place."""

    def __init__(self, ray: FakeRay, made: Any, cpus: int, kind: str) -> None:
        self.ray, self.made, self.cpus, self.kind = ray, made, cpus, kind
        self.at: Node | None = None
        self.dead = ""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(self._call(name, args)))

    async def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        while self.at is None and not self.dead:
            self.ray.place(self)
            await asyncio.sleep(0.005)
        if isinstance(self.made, Exception):
            raise self.made
        work = asyncio.ensure_future(getattr(self.made, name)(*args))
        try:
            while not self.dead and not work.done():
                await asyncio.wait((work,), timeout=0.005)
            if self.dead:
                raise RayError(f"The actor died.\n{self.dead}")
            return work.result()
        finally:
            work.cancel()

    def die(self, why: str) -> None:
        """With the process that it keeps, as this is told to end when its parent does."""
        self.dead = why
        if self.at is not None:
            self.at.actors.remove(self)
            self.at = None
        child = getattr(self.made, "_child", None)
        if child is not None:
            child.kill()


class FakeRay:
    """Looks like the module. `fails`: what the next actors raise instead of being made."""

    def __init__(self, *nodes: Node) -> None:
        self.machines = list(nodes)
        self.actors: list[Actor] = []
        self.fails: Exception | None = None
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.asked: list[dict[str, Any]] = []
        self.on = False

    def is_initialized(self) -> bool:
        return self.on

    def init(self, **options: Any) -> None:
        self.on = True

    def shutdown(self) -> None:
        self.on = False

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "Resources": {"CPU": n.cpus, "GPU": n.gpus, **({n.kind: 1} if n.kind else {})}}
            for n in self.machines
        ]

    def remote(self, **options: Any) -> Any:
        self.asked.append(options)

        def begin(cls: type, *args: Any) -> Actor:
            kind = next(iter(options["resources"]), "")
            actor = Actor(self, self.fails or cls(*args), options["num_cpus"], kind)
            self.actors.append(actor)
            return actor

        return lambda cls: SimpleNamespace(remote=lambda *args: begin(cls, *args))

    def place(self, actor: Actor) -> None:
        fit = [n for n in self.machines if n.free >= actor.cpus and actor.kind in ("", n.kind)]
        if fit:
            actor.at = min(fit, key=lambda n: len(n.actors))
            actor.at.actors.append(actor)

    def kill(self, actor: Actor) -> None:
        actor.die("killed")

    def end(self, node: Node) -> None:
        """The node dies with all that is on it."""
        self.machines.remove(node)
        for actor in list(node.actors):
            actor.die("The actor's node was terminated.")
