"""The models of `ik serve` with several: from a TOML file, or from a preset file, a folder and the hub's cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ikcli import log
from ikcli.cli.front_options import passed_on
from ikcli.cli.model_entries import OF_ALL_MODELS, EntryMaker, ModelSpec, check_front, clash, machine_budget
from ikcli.cli.models_folder import folder_models, projector_in
from ikcli.cli.models_preset import ALL, Preset, Section, read_preset
from ikcli.cli.models_toml import check_room, read_table
from ikcli.cli.parser import Parsed
from ikcli.errors import IkError, UsageError
from ikcli.hub.names import DEFAULT_QUANT, parse_ref
from ikcli.server.front.models_entries import CACHE, FOLDER, PRESET, ModelEntry, ModelsFile

_MAX = 4
"""The most models loaded at a time by default, as in llama.cpp."""


class Sources:
    """Where the models come from; call `read` again when something has changed there."""

    def __init__(self, parsed: Parsed) -> None:
        check_front(parsed)
        self._config = parsed.config
        self._server = server = parsed.config.server
        line = passed_on("serve", parsed.argv, lambda path: path in OF_ALL_MODELS, environment=False)
        self._maker = EntryMaker(line)
        self._budget: Mapping[str, int] = {}
        self.with_cache = server.models is None if server.models_cache is None else server.models_cache

    def read(self) -> ModelsFile:
        """Return all models, checked against their files; raise UsageError that names the problem and its place."""
        file = self._of_table() if self._server.models is not None else self._of_others()
        self._budget = self._budget or file.budget  # models that are loaded later take their part of the free memory
        limit = self._server.models_max
        file = replace(file, budget=self._budget, max=file.max if limit is None else limit, downloads=self.with_cache)
        check_room(file)
        if self._maker.downloads:
            self._check_start(file)
        self._maker.downloads = False  # a caller that reads the list again is waiting for it
        return file

    def _check_start(self, file: ModelsFile) -> None:
        first = [entry.name for entry in file.entries.values() if entry.preload]
        if 0 < file.max < len(first):
            raise UsageError(
                f"{len(first)} models are to be loaded at the start ({', '.join(first)}), and only {file.max} may be "
                "loaded at a time: raise --models-max"
            )

    def _of_table(self) -> ModelsFile:
        assert self._server.models is not None
        file = read_table(self._server.models, self._maker)
        cached = self._cached() if self.with_cache else {}
        more = {name: ModelSpec(name, name, path=path, source=CACHE) for name, path in cached.items()}
        entries = {entry.name: entry for entry in self._usable(more) if file.find(entry.name) is None}
        return replace(file, entries={**file.entries, **entries})

    # --- preset, folder, cache ----------------------------------------------------------------------------------------
    def _of_others(self) -> ModelsFile:
        server = self._server
        preset = read_preset(server.models_preset) if server.models_preset else Preset(Path(), Section(ALL), {})
        cached = self._cached() if self.with_cache else {}
        folder = folder_models(server.models_dir) if server.models_dir else {}
        if server.models_dir and not folder:
            log.notice_once(f"--models-dir {server.models_dir} has no GGUF file")
        entries = {}
        for section in preset.sections.values():
            entry = self._of_section(preset, section, cached, folder)
            if entry is not None:
                entries[section.name] = entry
        if self.with_cache and any(section.repo for section in preset.sections.values()):
            cached = self._cached()  # with what has been downloaded
        hidden = {self._hidden(preset, section, cached) for section in preset.sections.values()}
        hidden |= {alias for entry in entries.values() if entry.source == CACHE for alias in entry.aliases}
        for source, models in ((FOLDER, folder), (CACHE, cached)):
            specs = {
                name: self._spec(preset, Section(name), source, path)
                for name, path in models.items()
                if name not in entries and not (source == CACHE and name in hidden)
            }
            entries |= {entry.name: entry for entry in self._usable(specs)}
        if (twice := clash(entries.values())) is not None:
            one, name, other = twice
            raise UsageError(f"the model {one.name} has the name {name}, which is that of {other.name} already")
        if not entries and not self.with_cache:
            raise UsageError(f"no model found in {self._places()}")
        if not entries:
            log.notice_once(f"no model found in {self._places()} yet; POST /models or ik pull downloads one")
        return ModelsFile(
            server.models_preset or server.models_dir or Path(), entries, (), machine_budget(self._config), _MAX
        )

    def _places(self) -> str:
        server = self._server
        named = [str(path) for path in (server.models_preset, server.models_dir) if path is not None]
        return " and ".join(named + ["the cache"] * self.with_cache)

    def _spec(self, preset: Preset, section: Section, source: str, path: Path | None) -> ModelSpec:
        """Return the settings of a section, with those of [*] as defaults."""
        defaults = preset.defaults
        return ModelSpec(
            section.name,
            preset.where(section.name) if section.name in preset.sections else section.name,
            (defaults.options, section.options),
            path,
            self._projector(source, path),
            section.aliases,
            section.tags if section.tags is not None else defaults.tags or (),
            section.preload if section.preload is not None else bool(defaults.preload),
            stop_timeout=section.stop_timeout if section.stop_timeout is not None else defaults.stop_timeout,
            source=source,
        )

    def _projector(self, source: str, path: Path | None) -> Path | None:
        """Return the projector that lies beside a model in a folder of its own, or in the cache."""
        own = path is not None and (source == CACHE or (source == FOLDER and path.parent != self._server.models_dir))
        return projector_in(path.parent) if own and path is not None else None

    def _of_section(
        self, preset: Preset, section: Section, cached: Mapping[str, Path], folder: Mapping[str, Path]
    ) -> ModelEntry | None:
        """Return the model of a section, or None if it has to be downloaded first."""
        where, name = preset.where(section.name), section.name
        if section.names_model:
            spec = self._spec(preset, section, PRESET, None)
        elif name in folder:
            spec = self._spec(preset, section, FOLDER, folder[name])
        elif (key := _in_cache(name, cached)) is not None:
            spec = self._spec(preset, section, CACHE, cached[key])
            spec = spec if key == name else replace(spec, aliases=(*spec.aliases, key))
        elif self.with_cache and _is_ref(name):
            log.notice_once(f"{where} is not in the cache; it is served when POST /models or ik pull has downloaded it")
            return None
        else:
            raise UsageError(f"{where} needs model = FILE or hf-repo = USER/REPO:QUANT; no other source has it")
        try:
            return self._maker.entry(spec)
        except IkError as e:
            raise UsageError(f"{where}: {e}") from None

    def _hidden(self, preset: Preset, section: Section, cached: Mapping[str, Path]) -> str | None:
        """Return the cached model that a section with hf-repo replaces, unless both are wanted."""
        dedup = section.dedup if section.dedup is not None else preset.defaults.dedup
        return _in_cache(section.repo, cached) if dedup and section.repo else None

    def _usable(self, specs: Mapping[str, ModelSpec]) -> Iterator[ModelEntry]:
        """Return the entries of files that a folder or the cache holds, without those that cannot be used."""
        for spec in specs.values():
            try:
                yield self._maker.entry(spec)
            except IkError as problem:
                log.notice_once(f"the model {spec.name} is left out: {problem}")

    def _cached(self) -> dict[str, Path]:
        from ikcli.hub.cache import hub_models

        return {model.name: model.path for model in hub_models() if model.complete}


def _is_ref(name: str) -> bool:
    try:
        return bool(parse_ref(name))
    except IkError:
        return False


def _in_cache(name: str, cached: Mapping[str, Path]) -> str | None:
    """Return the cached model that `user/repo[:quant]` means."""
    if not _is_ref(name):
        return None
    ref = parse_ref(name)
    low = {key.lower(): key for key in cached}
    if ref.quant:
        return low.get(name.lower())
    of_repo = [key for key in cached if key.lower().startswith(f"{name.lower()}:")]
    return low.get(f"{name}:{DEFAULT_QUANT}".lower(), of_repo[0] if of_repo else None)
