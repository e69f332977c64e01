"""From a model's name to its files: fetching, conversion, integrity and facts, without torch."""

from octavo.sources.cache import CacheUsage, cache_usage
from octavo.sources.default_model import DEFAULT_MODEL
from octavo.sources.integrity import FileProblem, ProblemKind, inspect_files
from octavo.sources.model_source import ModelSource, Origin, SourceError
from octavo.sources.names import resolve
from octavo.sources.tokenizer_facts import VocabularyFacts, end_token_ids, tokenizer_hash, vocabulary_facts

__all__ = [
    "DEFAULT_MODEL",
    "CacheUsage",
    "FileProblem",
    "ModelSource",
    "Origin",
    "ProblemKind",
    "SourceError",
    "VocabularyFacts",
    "cache_usage",
    "end_token_ids",
    "inspect_files",
    "resolve",
    "tokenizer_hash",
    "vocabulary_facts",
]
