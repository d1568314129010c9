"""A session: one model, one KV cache, programs for prompts and for generation; tokens in, logits or embeddings out.

`sequences` manages sequence states and rollback. Programs are recorded once; a micro-batch only fills the step block.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.program import BATCH_INVARIANT_ROWS
from ikcli.backends.step_block import StepBlock
from ikcli.engine.plan.devices import Machine, opened_gpus
from ikcli.engine.plan.planner import Planner, PreparedRun
from ikcli.engine.plan.program_plans import memory_of, plan_programs
from ikcli.engine.plan.programs import EMBEDS, ENCODE, SHORT, output_bytes, record_graphs, step_tokens
from ikcli.engine.plan.sizes import Sizes
from ikcli.engine.run import gpus, host_memory, numa, session_log
from ikcli.engine.run.adapters import Added
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.encoders import EncoderTexts, longest_text
from ikcli.engine.run.huge_weights import HugeWeights
from ikcli.engine.run.media_places import MediaPlaces, places_of_text
from ikcli.engine.run.mtp import Heads
from ikcli.engine.run.run_device import Observer, look_for_non_finite
from ikcli.engine.run.runner import DividedProgram, Runner
from ikcli.engine.run.sequences import Sequences
from ikcli.engine.run.session_log import Timings
from ikcli.errors import IkError, NonFiniteError
from ikcli.graph import Cache
from ikcli.graph.micro_batch import Segment
from ikcli.log import log, progress, warn
from ikcli.models import EXPAND_MIN_TOKENS, MediaConfig, Outputs
from ikcli.models.sparse.indexer import top_k
from ikcli.quant.validate import check_finite
from ikcli.settings.adapters import RopeConfig
from ikcli.settings.run import RunConfig
from ikcli.tokenizer import Tokenizer

FloatRows = npt.NDArray[np.float32]


class Session:
    """Runs one model; make it with `open`. See the module."""

    def __init__(self, prepared: PreparedRun) -> None:
        plan = self.run_plan = prepared.plan
        self.config, self.model, self.graph_config = plan.config, prepared.model, plan.graph_config
        self.n_step = step_tokens(plan.sizes.n_step)
        self.n_ctx = plan.graph_config.n_ctx
        self.n_batch, self.n_ubatch = plan.config.n_batch, plan.graph_config.n_ubatch
        self.n_vocab, self.outputs = prepared.model.hp.n_vocab, plan.graph_config.outputs
        self.observer: Observer | None = None
        self.runner, self.graphs, self.programs = prepared.runner, prepared.graphs, prepared.programs
        self._cached = prepared.cached
        self._cpus, self._notes = numa.plan_threads(self.config, self.runner.cpu.n_threads)
        self.runner.cpu.cpus = self._cpus
        prepared.model.cpus = numa.home_of_weights(self.config, self._cpus)
        prepared.model.experts = self.runner.cpu.expert_nodes.counts
        self._huge: HugeWeights | None = None
        self._tokenizer: Tokenizer | None = None
        rotated = f"{int(self.graph_config.k_hadamard)}{int(self.graph_config.v_hadamard)}"
        if plan.config.rope != RopeConfig():
            rotated += f" {prepared.model.hp.rope}"
        window, n_window = prepared.model.hp.window, plan.graph_config.n_window
        self.sequences = Sequences(self.runner, plan.caches, self.n_ctx, plan.sizes.n_seq, rotated, window, n_window)
        self.timings = Timings()
        self.profile = session_log.new_profile() if self.config.profile else None
        self._n_outputs = min(plan.sizes.n_seq, self.n_ubatch)
        self._n_chosen = top_k(self.model.hp, self.graph_config)
        self.heads = Heads(self) if self.graph_config.n_heads else None
        self.sequences.settle = self.heads.settle if self.heads is not None else None
        start, n = self.model.hp.decoder_start, self.n_ubatch
        self._texts = EncoderTexts(self.sequences, start, n, self._encode) if start >= 0 else None
        self._in_flight: deque[tuple[DividedProgram, int, int]] = deque()  # program, threads, outputs
        self._last: tuple[DividedProgram, int]  # program and threads of the last micro-batch

    # --- open -------------------------------------------------------------------------------------------------------
    @classmethod
    def open(
        cls,
        config: RunConfig,
        *,
        n_ctx: int | None = None,
        n_seq_max: int = 1,
        n_step: int = 0,
        outputs: Outputs = Outputs.LOGITS,
        media: MediaConfig | None = None,
        planner: Planner | None = None,
    ) -> Session:
        """Load the model of `config` and print the load and context logs; n_ctx overrides the context size.

        `n_step`: the most tokens of one call of `step` (0: one). `outputs`: logits, embeddings or both. `media`: of
        images in batches (`Projector.media_config`). `planner`: an open planner of the same model.
        """
        session = cls.plan(config, n_ctx=n_ctx, n_seq_max=n_seq_max, n_step=n_step, outputs=outputs, media=media,
                           planner=planner)  # fmt: skip
        session.load()
        if config.warmup:
            session.warm_up()
        return session

    @classmethod
    def plan(
        cls,
        config: RunConfig,
        *,
        n_ctx: int | None = None,
        n_seq_max: int = 1,
        n_step: int = 0,
        outputs: Outputs = Outputs.LOGITS,
        media: MediaConfig | None = None,
        planner: Planner | None = None,
    ) -> Session:
        """Plan the session up to reading weights: sizes are known, nothing is allocated. Print the logs."""
        planner = planner or Planner.of_file(config)
        devices = gpus.open_devices(config) if gpus.wanted(config) else {}
        if devices or planner.machine.gpus:
            run_devices = {name: gpus.run_device(device) for name, device in devices.items()}
            planner = planner.on(Machine(opened_gpus(devices)), run_devices)
        session_log.model_lines(planner.file, planner.hp, config)
        prepared = planner.prepare(config, Sizes(n_ctx or config.n_ctx, n_seq_max, n_step, outputs, media))
        gpus.hand_over(prepared.runner, devices)
        for text in prepared.plan.warnings:
            warn(text)
        session = cls(prepared)
        session_log.context_lines(prepared)
        return session

    def again(self, runner: Runner) -> Session:
        """Return a second session of the model with the same settings, which computes with `runner`."""
        model = self.model
        graphs = record_graphs(model, model.weights(), self.graph_config)
        programs = plan_programs(runner, graphs, self.graph_config, self._n_outputs, self.run_plan.sizes.n_step)
        return Session(PreparedRun(self.run_plan, model, graphs, runner, programs))

    def load(self) -> None:
        """Compile kernels, map or read weights, allocate the cache and buffers."""
        start = time.perf_counter()
        self.compile()
        programs = list(self.programs.values())
        if self.config.check_tensors:
            check_finite(self.model.file, {w for names in self.runner.weight_names(programs).values() for w in names})
        experts = self.runner.cpu.experts
        if experts is not None:
            for kind in {"decode", "step"} & set(self.graphs):
                experts.know(self.model, self.graphs[kind][0])
        self.runner.load(programs, self.model, self.config.mmap, self.run_plan.beside)
        self.runner.cpu.mirror.make(self.model, self.runner.host_weights)
        self._huge, notes = host_memory.huge_weights(self.config, self.model, self.runner)
        try:
            media = self.graph_config.media
            cols = media.cols(self.model.hp.n_embd) if media is not None else 0
            self.step_block = StepBlock(max(self.n_ubatch, self.n_step), self.n_ctx, cols)
            self.runner.make_caches(programs)
            self.runner.bind(programs, self.step_block)
            for text in [*self._notes, *notes, *host_memory.place(self.config, self.model, self.runner, self._cpus)]:
                warn(text)
        except MemoryError:
            need = (sum(self.cache_bytes().values()) + self.compute_bytes) / 2**20
            raise IkError(
                f"out of memory: CPU wants {need:.0f} MiB for the KV cache and compute buffers; "
                "lower -c or -ub, or use -ctk q8_0"
            ) from None
        self.timings.t_load = time.perf_counter() - start

    def restart(self) -> None:
        """Load the model again after a stage lost its memory; all sequences are empty then."""
        self._in_flight.clear()
        self.sequences.clear()
        self.runner.load(list(self.programs.values()), self.model, self.config.mmap)
        self.runner.bind(list(self.programs.values()), self.step_block)

    def compile(self) -> None:
        """Load the kernels; compile those that the cache lacks, with a progress bar."""
        programs = list(self.programs.values())
        with progress("compiling kernels", self.runner.n_missing(programs)) as advance:
            self.runner.prepare(programs, lambda done, total: advance(1))

    def cache_bytes(self) -> Mapping[Cache, int]:
        """Return the bytes of every cache tensor in the layout of RAM."""
        return self.run_plan.caches

    def memory(self) -> dict[str, dict[str, int]]:
        """Return bytes by device (CPU first) and part: weights, KV, compute, output."""
        return memory_of(self.runner, self.programs, self.model, self.output_bytes)

    @property
    def longest_text(self) -> int:
        """Return the most tokens of a text to embed."""
        return longest_text(self.model.hp, self.n_ctx_seq, self.n_ubatch)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Return the names of the GPUs in use."""
        return self.runner.gpus

    @property
    def output_bytes(self) -> int:
        """Return the bytes of logits and embeddings kept for the caller."""
        return output_bytes(self.graph_config, self.model, self._n_outputs)

    @property
    def compute_bytes(self) -> int:
        """Return the bytes of work buffers in RAM, which the programs share."""
        return max(p.arena_bytes for p in self.programs.values())

    # --- use --------------------------------------------------------------------------------------------------------
    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the model, made on first use."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_metadata(self.model.file.metadata, self.model.source)
        return self._tokenizer

    def warm_up(self) -> None:
        """Compute one token, then empty the cache: this pages weights in and wakes the threads."""
        bos = self.model.file.get("tokenizer.ggml.bos_token_id", 0)
        first = Batch.single([bos if 0 <= int(bos) < self.n_vocab else 0])
        if self.outputs.logits:
            self.decode(first)
        else:
            self.run_segments("decode" + EMBEDS, first.tokens, np.zeros(1, np.int64), [Segment(0, 1, 0, 0)])
        self.clear()
        self.timings = Timings(self.timings.t_load)
        if self.profile is not None:
            self.profile.clear()

    def decode(self, batch: Batch) -> FloatRows:
        """Return the logits (n_outputs, n_vocab) of the wanted tokens in batch order.

        They are valid until the next call.
        """
        start = time.perf_counter()
        if len(batch) == 1:
            self.submit(batch)
            parts = [self._checked(self.collect())]  # in the work memory itself, which the next micro-batch overwrites
        else:
            parts = self._decode_all(batch)
        self.timings.add(len(batch), time.perf_counter() - start)
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty((0, self.n_vocab), np.float32), *parts])

    def _decode_all(self, batch: Batch) -> list[FloatRows]:
        """Compute micro-batch after micro-batch, with as many in flight as the runner allows."""
        parts: list[FloatRows] = []
        try:
            for start, stop in batch.cuts(self.n_ubatch):
                if self.n_in_flight == self.runner.depth:
                    parts.append(self._checked(self.collect()).copy())
                self.submit(batch.slice(start, stop))
            while self.n_in_flight:
                parts.append(self._checked(self.collect()).copy())
        finally:
            self.abandon()
        return parts

    def abandon(self) -> None:
        """Wait for all micro-batches in flight and drop their logits."""
        while self._in_flight:
            with suppress(IkError):
                self.collect()

    def _checked(self, logits: FloatRows) -> FloatRows:
        # A sum is not finite if a term is not; it can also overflow by itself, so look closer before raising.
        if not math.isfinite(np.add.reduce(logits, axis=None)) and not np.isfinite(logits).all():
            self._explain_non_finite(*self._last)
        return logits

    @property
    def n_in_flight(self) -> int:
        """Return the number of micro-batches that were submitted and not collected; at most `runner.depth`."""
        return len(self._in_flight)

    def submit(self, batch: Batch) -> None:
        """Submit a micro-batch; `collect` returns its logits, those of the oldest one first."""
        if not self.outputs.logits:
            raise IkError("the session was opened for embeddings and has no logits")
        self._settle()
        if self._texts is not None:
            batch = self._texts.read(batch)
        n = len(batch)
        if not n:  # a part of a text that is encoded later
            self._in_flight.append((self.programs["decode"], self.config.n_threads_batch, 0))
            return
        if n == 1 and not batch.media:
            self._next(batch.tokens.tolist(), batch.pos.tolist(), batch.seq.tolist(), int(batch.logits[0]))
            return
        out_ids = np.flatnonzero(batch.logits)
        if len(out_ids) > self._n_outputs:
            self.plan_outputs(min(self.n_ubatch, 1 << (len(out_ids) - 1).bit_length()))
        self._fill(batch, out_ids)
        kind = "prefill" if n >= EXPAND_MIN_TOKENS and "prefill" in self.programs else "decode"
        if kind == "prefill" and SHORT in self.programs:
            longest = max(self.sequences.n_past[seq] for seq in {*batch.seq.tolist()})
            kind = SHORT if longest <= self._n_chosen else kind
        self._start(self.programs[kind], self.config.n_threads_batch, len(out_ids))

    def _fill(self, batch: Batch, out_ids: npt.NDArray[np.int64]) -> None:
        """Write a micro-batch and its images into the step block, and count them as cached."""
        if self.graph_config.media is None:
            if batch.media:
                raise IkError("the session was opened without a projector and takes no images")
            pos, segments = batch.pos, self._segments(batch)
            pos, segments = self._texts.placed(segments) if self._texts is not None else (pos, segments)
            self.step_block.set(batch.tokens, pos, out_ids, segments)
            return
        placed = MediaPlaces(batch, self.sequences, self.graph_config.media, self.step_block.media_cols)
        segments = self._segments(placed.batch)
        placed.note(self.sequences)
        self.step_block.set(placed.batch.tokens, batch.pos, out_ids, segments)
        self.step_block.set_media(placed.places, placed.rows)

    def _encode(self, tokens: npt.NDArray[np.int32], segments: Sequence[Segment]) -> None:
        """Encode texts: keys and values for the decoder are in the caches then."""
        self._check_ids(tokens)
        pos = np.concatenate([np.arange(s.n_tokens, dtype=np.int32) for s in segments])
        self.step_block.set(tokens, pos, np.zeros(0, np.int64), segments)
        self._start(self.programs[ENCODE], self.config.n_threads_batch, 0)
        self.collect()

    def _next(
        self,
        tokens: Sequence[int],
        pos: Sequence[int],
        seqs: Sequence[int],
        n_outputs: int,
        beside: Callable[[], None] | None = None,
    ) -> None:
        """Submit one token of each of these sequences with the program for generation."""
        if not 0 <= min(tokens) <= max(tokens) < self.n_vocab:
            raise IkError(f"a token id is outside the vocabulary of {self.n_vocab}")
        self._settle()
        sequences = self.sequences
        sequences.check_each(seqs, pos)
        windows = [sequences.room(seq, 1) for seq in seqs] if sequences.has_windows else ()
        n_rows = n_outputs if self.heads is None else len(tokens)  # the states are those of output rows
        if self._texts is not None:
            self.step_block.set(np.array(tokens, np.int32), *self._texts.step(pos, seqs, n_rows))
        else:
            self.step_block.set_step(tokens, pos, seqs, sequences.n_ctx, n_rows, windows)
        if self.graph_config.media is not None:
            self.step_block.set_media(places_of_text(pos, [sequences.shift(seq) for seq in seqs]))
        n_past = sequences.n_past
        for seq in seqs:
            n_past[seq] += 1
        if self.heads is not None and self.heads.asleep:
            self.heads.skips = self.heads.asleep.issuperset(seqs)
        if beside is not None:
            beside()
        self._start(self.programs["step"], self.config.n_threads, n_outputs)

    def settle_weights(self) -> None:
        """Move mapped weights into huge pages now, if they ever are, so that all that is timed later reads the same."""
        if self._huge is not None and self._huge.settle():
            self._bind()

    def _bind(self) -> None:
        self.runner.bind(list(self.programs.values()), self.step_block)

    def _start(self, program: DividedProgram, n_threads: int, n_outputs: int) -> None:
        if self._huge is not None and program is self.programs.get("step") and self._huge.step():
            self._bind()
        if self.profile is not None:
            self.profile.run(self.runner, program, n_threads, self.step_block, self.observer)
        elif self.observer is None:
            self.runner.run(program, n_threads, self.step_block)
        else:
            self.runner.run_observed(program, n_threads, self.step_block, self.observer)
        self._in_flight.append((program, n_threads, n_outputs))

    def collect(self) -> FloatRows:
        """Return the logits of the oldest micro-batch in flight; the next one overwrites them."""
        program, n_threads, n_outputs = self._in_flight.popleft()
        self._last = program, n_threads
        if self.heads is not None:
            self.heads.saw(program)
        return self.runner.result(program, n_outputs)

    def _settle(self) -> None:
        """Let heads compute the rows that are due; nothing is in flight then."""
        if self.heads is not None:
            self.heads.settle()

    def run_segments(
        self, kind: str, tokens: npt.NDArray[np.int32], out_ids: npt.NDArray[np.int64], segments: Sequence[Segment]
    ) -> FloatRows:
        """Run the program `kind` for a micro-batch with given segments; the next one overwrites the rows."""
        start = time.perf_counter()
        self._settle()
        self._check_ids(tokens)
        pos = np.concatenate([np.arange(s.pos, s.n_kv, dtype=np.int32) for s in segments])
        self.step_block.set(tokens, pos, out_ids, segments)
        if self.graph_config.media is not None:
            self.step_block.set_media(places_of_text(pos, np.zeros_like(pos)))
        self._start(self.programs[kind], self.config.n_threads_batch, len(out_ids))
        found = self.collect()
        self.timings.add(len(tokens), time.perf_counter() - start)
        return self._checked(found)

    def _check_ids(self, tokens: npt.NDArray[np.int32]) -> None:
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.n_vocab:
            raise IkError(f"a token id is outside the vocabulary of {self.n_vocab}")

    def _segments(self, batch: Batch) -> list[Segment]:
        self._check_ids(batch.tokens)
        seq = batch.seq.tolist()
        starts = [0, *(i for i in range(1, len(seq)) if seq[i] != seq[i - 1]), len(seq)]
        segments = [self._segment(batch, a, b) for a, b in pairwise(starts)]
        for s, a in zip(segments, starts, strict=False):
            self.sequences.n_past[seq[a]] = s.n_kv
        return segments

    def _segment(self, batch: Batch, start: int, stop: int) -> Segment:
        seq, pos, n = int(batch.seq[start]), int(batch.pos[start]), stop - start
        follow = n == 1 or bool((np.diff(batch.pos[start:stop]) == 1).all())
        self.sequences.check_next(seq, pos, n, follow=follow)
        window = self.sequences.room(seq, n)
        return Segment(start, n, seq * self.n_ctx_seq, pos, seq, window)

    def plan_outputs(self, n: int) -> None:
        """Plan and bind the programs again, for n logits per micro-batch."""
        n_step = self.run_plan.sizes.n_step
        self._n_outputs = n
        self.programs = plan_programs(self.runner, self.graphs, self.graph_config, n, n_step, self._cached)
        self.runner.bind(list(self.programs.values()), self.step_block)

    def _explain_non_finite(self, program: DividedProgram, n_threads: int) -> None:
        """Run the micro-batch again, node by node, and name the first one that is not finite."""
        self.runner.explain(program, n_threads, self.step_block, look_for_non_finite(self.model.source))
        raise NonFiniteError(f"{self.model.source}: the result is NaN or Inf, but not when computed again node by node")

    def compute(self, batch: Batch) -> FloatRows:
        """Return the logits of one micro-batch, which the caller checks for NaN; the next one overwrites them."""
        start = time.perf_counter()
        self.submit(batch)
        logits = self.collect()
        self.timings.add(len(batch), time.perf_counter() - start)
        return logits

    def step(self, batch: Batch) -> FloatRows:
        """Return the logits of all (at most n_step) tokens with the program for generation; otherwise as `compute`.

        Up to `n_exact` tokens the results are batch-invariant: those of a token do not depend on the rest of the batch,
        to the last bit.
        """
        if len(batch) > self.n_step:
            raise IkError(f"a step of {len(batch)} tokens, but the session was opened for {self.n_step}")
        start = time.perf_counter()
        self._settle()
        if self._texts is not None:
            batch = self._texts.read(batch)
        out_ids = np.arange(len(batch))
        if batch.media:
            raise IkError("images are computed by decode and submit, not by step")
        self._fill(batch, out_ids)
        self._start(self.programs["step"], self.config.n_threads, len(batch))
        logits = self.collect()
        self.timings.add(1, time.perf_counter() - start)
        return logits

    def step_each(
        self,
        tokens: Sequence[int],
        pos: Sequence[int],
        seqs: Sequence[int],
        beside: Callable[[], None] | None = None,
    ) -> FloatRows:
        """Return the logits of one token of each of these sequences (each named once).

        This takes less work to describe than `step`. `beside` is called when everything is ready to be computed: work
        that it wakes runs beside the computation.
        """
        start = time.perf_counter()
        self._next(tokens, pos, seqs, len(tokens), beside)
        logits = self.collect()
        self.timings.add(1, time.perf_counter() - start)
        return logits

    def submit_each(self, tokens: Sequence[int], pos: Sequence[int], seqs: Sequence[int]) -> None:
        """Submit one token of each of these sequences, as `step_each` does; `collect` returns the logits."""
        self._next(tokens, pos, seqs, len(tokens))

    def generate(self, batch: Batch) -> FloatRows:
        """Return the logits of all tokens of a batch with one token per sequence.

        It uses the program for generation where that is large enough: measured from 1 to 32 sequences, it is never
        slower.
        """
        return self.step(batch) if len(batch) <= self.n_step else self.decode(batch)

    @property
    def encodes(self) -> bool:
        """Return whether the model is an encoder beside a decoder: prompts are read as a whole then."""
        return self._texts is not None

    @property
    def n_exact(self) -> int:
        """Return the number of tokens up to which `step` is batch-invariant."""
        return BATCH_INVARIANT_ROWS

    @property
    def n_outputs(self) -> int:
        """Return the logits that a micro-batch of a prompt can have; see `plan_outputs`."""
        return self._n_outputs

    @property
    def n_seq_max(self) -> int:
        """Return the number of sequences that share the cache."""
        return self.sequences.n_seq

    @property
    def n_ctx_seq(self) -> int:
        """Return the number of positions that a sequence has room for."""
        return self.sequences.n_ctx

    def clear(self) -> None:
        """Drop all sequences."""
        self.sequences.clear()

    def apply(self, added: Added) -> None:
        """Use adapters with these scales, and these control vectors, from now on."""
        present = self.model.adapters.added
        if added is not present and added != present:
            self.runner.update_weights(self.model, self.model.apply(added))

    def truncate(self, seq: int, n: int) -> int:
        """Drop positions from n on as far as possible; return how many are left. See `Sequences.truncate`."""
        return self.sequences.truncate(seq, n)

    def checkpoint(self, seq: int, *, likely: bool = False) -> None:
        """Save the present state of a sequence for a rollback. See `Sequences.checkpoint`."""
        self.sequences.checkpoint(seq, likely=likely)

    def close(self) -> None:
        """Stop the threads, release memory, and log tokens and times."""
        for line in [
            *session_log.timing_lines(self.timings),
            *session_log.expert_lines(self.runner),
            *session_log.profile_lines(self.profile, self.model, self.run_plan.placement.buffer_of, self.runner),
        ]:
            log(line)
        self.timings, self.profile = Timings(), None
        if self._huge is not None:
            self._huge.close()
        self.runner.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
