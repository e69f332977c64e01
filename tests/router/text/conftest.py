"""Model directories shared by the text tests, built once a session."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from text_models import STYLES

from octavo.sources import resolve
from router.text.chat_template import ChatTemplates
from router.text.prompt import PromptBuilder
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextModel:
    """A model directory with everything of the router's that reads it."""

    name: str
    directory: Path
    tokenizer: Tokenizer
    templates: ChatTemplates
    prompts: PromptBuilder


def load_text_model(name: str, directory: Path) -> TextModel:
    tokenizer = Tokenizer.load(directory)
    templates = ChatTemplates.load(directory, tokenizer.config)
    prompts = PromptBuilder(tokenizer, templates, vocab_size=tokenizer.vocab_size, max_model_len=4096)
    return TextModel(name, directory, tokenizer, templates, prompts)


@pytest.fixture(scope="session")
def text_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextModel]:
    """Every style, and the default model itself."""
    root = tmp_path_factory.mktemp("text_models")
    built = {name: load_text_model(name, build(root / name)) for name, build in STYLES.items()}
    return {**built, "default": load_text_model("default", resolve("default").directory)}


ALL_MODELS = [*STYLES, "default"]


@pytest.fixture(params=ALL_MODELS)
def text_model(request: pytest.FixtureRequest, text_models: dict[str, TextModel]) -> TextModel:
    return text_models[request.param]
