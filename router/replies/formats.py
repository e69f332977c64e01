"""The ways in which models write tool calls, as data, and which one a chat template teaches.

Knows templates by their text alone. A way that is not here is not guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CallFormat:
    """Where calls stand in a text. What stands there is `{"name": …, "arguments" or "parameters": {…}}`."""

    name: str
    """As --tool-call-parser spells it."""
    opener: str
    """What comes before a call, or before a list of them."""
    closer: str = ""
    """What comes after a call; a model may leave it out."""
    separator: str = ""
    """What comes between calls of one opening."""
    begins_bare: bool = False
    """A text that begins with a call needs no opener."""
    takes_list: bool = False
    """One opener may be followed by a JSON array of calls."""
    takes_names: bool = False
    """The opener may be followed by NAME{…}, or by NAME[ARGS]{…}, instead of an object."""
    short_ids: bool = False
    """Call ids are nine letters and digits; the templates of these models refuse any other."""


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3 = CallFormat("llama3_json", "<|python_tag|>", separator=";", begins_bare=True)
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", takes_list=True, takes_names=True, short_ids=True)

FORMATS: Mapping[str, CallFormat] = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}

TOOL_CALL_PARSERS = ("auto", *FORMATS)


def detect_format(template_source: str) -> CallFormat | None:
    """The format that a chat template writes earlier calls in; None for one that is not known."""
    if HERMES.opener in template_source:
        # Some models put XML between the same tags.
        return None if "<function=" in template_source or "<arg_key>" in template_source else HERMES
    if MISTRAL.opener in template_source:
        return MISTRAL
    if LLAMA3.opener in template_source or ("ipython" in template_source and '"parameters": ' in template_source):
        return LLAMA3
    return None
