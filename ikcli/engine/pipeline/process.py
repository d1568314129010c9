"""Run one stage: load its layers, then compute what arrives and send on what leaves, until told to stop.

Stages form a chain that begins and ends at the driver. Everything that must happen in order goes along the chain:
micro-batches, adapters, and rows of caches to read, write or move. A stage that a message does not concern passes it
on.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

import ikcli
from ikcli.engine.pipeline.options import LARGE, StageOptions
from ikcli.engine.pipeline.part import StageRunner
from ikcli.engine.pipeline.place import Pipeline
from ikcli.engine.pipeline.wire import Buffer, Link, LostLinkError, MessageKind, StageListener, connect
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run.adapters import Added
from ikcli.engine.run.control_vectors import VectorUse
from ikcli.engine.run.run_device import look_for_non_finite
from ikcli.engine.run.runner import DividedProgram
from ikcli.engine.run.session import Session
from ikcli.errors import IkError, NonFiniteError
from ikcli.gguf.digests import of_model
from ikcli.graph import Cache, Node, Rows
from ikcli.log import hushed

_LOADING = 24 * 3600.0  # seconds that neighbours may take

Message = tuple[MessageKind, dict[str, Any], memoryview]


def work(options: StageOptions) -> None:
    """Run a stage until the chain ends; report errors while loading to the driver."""
    listener = StageListener(options.host, options.secret)
    host, port = listener.address
    hello = {"secret": options.secret, "index": options.index, "version": ikcli.__version__}
    control = connect(options.driver, hello | {"host": host, "port": port, "pid": os.getpid()})
    try:
        try:
            stage = _Stage(options)
        except IkError as error:
            control.send(MessageKind.FAILED, {"error": str(error)})
            return
        except Exception as error:
            control.send(MessageKind.FAILED, {"error": f"internal error: {type(error).__name__}: {error}"})
            return
        try:
            control.send(MessageKind.READY, {})
            _, words, _ = control.receive()
            onward = connect((words["host"], words["port"]), {"secret": options.secret, "index": options.index})
            with closing(onward):
                stage.serve(_neighbour(listener), onward)
        except LostLinkError:
            control.send(MessageKind.FAILED, {"error": "a neighbour was lost"})  # not in this stage
        finally:
            stage.close()
    except LostLinkError:
        pass  # the driver has ended
    finally:
        control.close()
        listener.close()


def _neighbour(listener: StageListener) -> Link:
    while True:
        found = listener.accept(_LOADING)
        if found is not None:
            return found[0]


class _Stage:
    """A loaded stage."""

    def __init__(self, options: StageOptions) -> None:
        config = options.config
        assert config.model is not None
        with hushed(True):
            planner = Planner.of_file(config, pipeline=Pipeline(stage=(options.split_points, options.index)))
            if of_model(planner.file) != options.digest:
                raise IkError(f"{config.model} on this node is another file than that of the command")
            self._session = Session(planner.prepare(config, options.sizes))
            self._session.load()
        assert isinstance(self._session.runner, StageRunner)
        self._runner: StageRunner = self._session.runner
        self._state = self._session.step_block
        self._caches: dict[tuple[str, int], Cache] = {(c.kind, c.il): c for c in self._runner.own_caches}
        self._values: dict[Node, npt.NDArray[np.uint8]] = {}

    @property
    def _programs(self) -> list[DividedProgram]:
        return list(self._session.programs.values())

    def serve(self, arriving: Link, onward: Link) -> None:
        """Compute and pass on messages until STOP has been sent on.

        While one piece of a prompt is computed, the next one is received and the last one sent. This thread receives
        and sends small messages itself, which is quicker.
        """
        coming: Future[Message] | None = None
        going: Future[None] | None = None
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer, closing(arriving), closing(onward):
            while True:
                kind, words, data = coming.result() if coming is not None else arriving.receive()
                is_large = kind is MessageKind.RUN and len(data) >= LARGE
                coming = reader.submit(arriving.receive, keep=True) if is_large else None
                answer = self._answered(kind, words, data)
                if going is not None:
                    going.result()
                    going = None
                if answer is not None and is_large:
                    to, words, parts = answer
                    going = writer.submit(onward.send, to, words, [b"".join(parts)])
                elif answer is not None:
                    onward.send(*answer)
                if kind is MessageKind.STOP:
                    return

    def _answered(self, kind: MessageKind, words: dict[str, Any], data: memoryview) -> Any:
        """Return the message to send on, or None; errors become messages."""
        try:
            return self._answer(kind, words, data)
        except IkError as error:
            what = "NonFiniteError" if isinstance(error, NonFiniteError) else "IkError"
            return MessageKind.ERROR, {"of": kind.value, "error": str(error), "class": what}, ()
        except Exception as error:  # a bug here: tell the driver, rather than appear as a lost stage
            text = f"internal error in stage {self._runner.index + 1}: {type(error).__name__}: {error}"
            return MessageKind.ERROR, {"of": kind.value, "error": text, "class": "IkError"}, ()

    def _answer(self, kind: MessageKind, words: dict[str, Any], data: memoryview) -> Any:
        """Return the message to send on, or None."""
        onward = (kind, words, (data,))
        if kind is MessageKind.RUN:
            return self._run(words, data)
        if kind in (MessageKind.READ, MessageKind.WRITE, MessageKind.MOVE):
            cache = self._caches.get((words["kind"], words["il"]))
            if cache is None:
                return onward
            if kind is MessageKind.READ:
                rows = np.ascontiguousarray(self._runner.read_cells(cache, words["first"], words["n"]))
                return MessageKind.CELLS, {"shape": rows.shape}, (rows,)
            if kind is MessageKind.WRITE:
                rows = np.frombuffer(data, np.uint8).reshape(words["shape"])
                self._runner.write_cells(cache, words["first"], rows)
            else:
                self._runner.move_cells(cache, words["source"], words["first"], words["n"])
            return None
        if kind is MessageKind.OUTPUTS:
            self._session.plan_outputs(words["n"])
        elif kind is MessageKind.SCALES:
            self._session.apply(Added(tuple(words["scales"]), tuple(VectorUse(*use) for use in words["vectors"])))
        if self._runner.is_last and kind in (MessageKind.OUTPUTS, MessageKind.SCALES):
            return None
        return onward

    def _run(self, words: dict[str, Any], data: memoryview) -> tuple[MessageKind, dict[str, Any], list[Buffer]]:
        program = self._programs[words["program"]]
        at = self._state.unpack(data, compact=words["compact"])
        if words["given"] and self._runner.index == 0:  # later stages receive what the first one makes of them
            n = self._state.rows[Rows.TOKENS]
            self._state.give(np.frombuffer(data, np.float32, n * words["given"], at).reshape(n, -1).copy())
            at += self._state.given.nbytes
        part = self._runner.part(program.graph)
        arrived: dict[Node, memoryview] = {}
        for node in part.arriving:
            size = self._size(node)
            arrived[node] = data[at : at + size]
            at += size
            if node in program.memory:
                program.memory[node][:size] = np.frombuffer(arrived[node], np.uint8)
        if words["look"]:
            self._runner.run_observed(
                program, words["threads"], self._state, look_for_non_finite(self._session.model.source)
            )
        else:
            self._runner.run(program, words["threads"], self._state)
        if self._runner.is_last:
            found = [self._runner.result(program, words["outputs"])]
            if program.states is not None:
                found.append(self._runner.states(program, self._state.rows[program.states.rows.symbol]))
            return MessageKind.RESULT, {}, [*found]
        leaving: list[Buffer] = [*self._state.packed()]
        leaving += [arrived[n] if n in arrived else program.memory[n][: self._size(n)] for n in part.leaving]
        return MessageKind.RUN, words, leaving

    def _size(self, node: Node) -> int:
        return self._state.rows[node.rows.symbol] * node.rows.factor * node.cols * 4

    def close(self) -> None:
        with hushed(True):
            self._session.close()
