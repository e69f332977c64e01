"""What a resolved model is: where its metadata and its weights lie on this machine.

Knows names and paths only. It must not know how a name was resolved, and never opens a file.
"""

import enum
from dataclasses import dataclass
from pathlib import Path


class SourceError(Exception):
    """A model name or file that cannot be used; the message names it and says what to do."""


class Origin(enum.Enum):
    """Where the files came from."""

    DIRECTORY = "directory"
    GGUF = "gguf"
    HUB = "hub"
    DEFAULT = "default"


@dataclass(frozen=True)
class ModelSource:
    """One model on local disk.

    `directory` holds config.json, tokenizer.json, tokenizer_config.json and, where the model has one,
    generation_config.json and chat_template.jinja, in Hugging Face's format. `weights` is the same
    directory for a safetensors checkpoint, or a `.gguf` file.
    """

    name: str
    origin: Origin
    directory: Path
    weights: Path

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are one GGUF file rather than a directory of safetensors."""
        return self.weights != self.directory
