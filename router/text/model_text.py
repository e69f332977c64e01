"""All that the router knows of its model's text: tokenizer, chat template, sampling defaults, and their hash.

Read once at start from the model's files, by `load_model_text`; frozen afterwards. Knows no weights and no workers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from octavo.process import StartError
from octavo.sources import tokenizer_hash
from router.errors import InvalidRequest
from router.replies.setup import ReplySettings
from router.sampling import SamplingDefaults
from router.text.chat_template import ChatTemplates, TemplateFileError
from router.text.prompt import PromptBuilder
from router.text.tokenizer import Tokenizer, TokenizerError, read_json_object

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelText:
    """One model's text side. Immutable; safe in several threads."""

    name: str
    tokenizer: Tokenizer
    templates: ChatTemplates
    defaults: SamplingDefaults
    tokenizer_hash: str
    replies: ReplySettings = field(default_factory=ReplySettings)

    def prompts(self, *, vocab_size: int, max_model_len: int) -> PromptBuilder:
        """The builder for a model of this size; the same one for the same numbers."""
        return _prompts(self.tokenizer, self.templates, vocab_size, max_model_len)


@lru_cache(maxsize=64)
def _prompts(tokenizer: Tokenizer, templates: ChatTemplates, vocab_size: int, max_model_len: int) -> PromptBuilder:
    return PromptBuilder(tokenizer, templates, vocab_size=vocab_size, max_model_len=max_model_len)


def load_model_text(
    name: str, directory: Path, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> ModelText:
    """Read the tokenizer and what belongs to it. Raises StartError naming the file."""
    try:
        tokenizer = Tokenizer.load(directory)
        templates = ChatTemplates.load(directory, tokenizer.config)
        defaults = SamplingDefaults.from_generation_config(read_json_object(directory / "generation_config.json"))
    except (TokenizerError, TemplateFileError, InvalidRequest) as error:
        raise StartError(str(error)) from error
    if not templates.named:
        _LOG.warning("%s has no chat template: chat requests will be refused, completions work", directory)
    if differing := defaults.differing():
        values = ", ".join(f"{key} {value:g}" for key, value in differing.items())
        _LOG.info("sampling defaults by %s: %s", directory / "generation_config.json", values)
    source = "\n".join(template.source for _, template in sorted(templates.named.items()))
    replies = ReplySettings.choose(source, tool_call_parser, reasoning_parser)
    return ModelText(name, tokenizer, templates, defaults, tokenizer_hash(directory), replies)
