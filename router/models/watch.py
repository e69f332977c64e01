"""Takes the file of --models at start, and again whenever it changes; a bad change leaves what there was."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from octavo.files import stamp_of
from octavo.process import StartError
from octavo.sources import SourceError, resolve
from router.models.catalogue import Catalogue
from router.models.models_file import ModelEntry, ModelsFile, ModelsFileError, read_models_file
from router.text.model_text import ModelText, load_model_text

_LOG = logging.getLogger(__name__)

POLL_S = 1.0


class ModelsWatch:
    """Keeps a catalogue in step with the file. Texts that are read already are not read again."""

    def __init__(self, path: str | Path, catalogue: Catalogue, poll_s: float = POLL_S) -> None:
        self._poll_s = poll_s
        self._path = path
        self._catalogue = catalogue
        self._loaded: dict[str, tuple[ModelEntry, ModelText]] = {}
        self._stamp = stamp_of(path)

    def load(self) -> Callable[[], None]:
        """Read the file and every new model's text, which takes long; what is returned puts them in place.

        Raises StartError.
        """
        try:
            file = read_models_file(self._path, self._catalogue.own)
            loaded = {name: self._load_one(name, entry) for name, entry in file.models.items()}
        except (ModelsFileError, SourceError) as error:
            raise StartError(f"--models {error}") from error
        return lambda: self._take(file, loaded)

    async def run(self, changed: Callable[[], None] = lambda: None) -> None:
        """Look at the file now and then until cancelled; `changed` is called after each change that is taken."""
        while True:
            await asyncio.sleep(self._poll_s)
            stamp = stamp_of(self._path)
            if stamp == self._stamp:
                continue
            self._stamp = stamp
            try:
                put_in_place = await asyncio.to_thread(self.load)
            except StartError as error:
                _LOG.warning("the changed file of models is not taken, the old models stay: %s", error)
            else:
                put_in_place()
                changed()

    def _load_one(self, name: str, entry: ModelEntry) -> tuple[ModelEntry, ModelText]:
        known = self._loaded.get(name)
        if known is not None and known[0] == entry:
            return known
        directory = resolve(entry.path).directory
        return entry, load_model_text(name, directory, entry.tool_call_parser, entry.reasoning_parser)

    def _take(self, file: ModelsFile, loaded: Mapping[str, tuple[ModelEntry, ModelText]]) -> None:
        self._loaded = dict(loaded)
        self._catalogue.replace_others({name: text for name, (_, text) in loaded.items()}, file.aliases)
        _LOG.info("models: %s; aliases: %s", ", ".join(self._catalogue.names), ", ".join(file.aliases) or "none")
