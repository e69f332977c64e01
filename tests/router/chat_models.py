"""Model directories whose templates teach a format of tool calls, or thinking."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.router_stack import TURN, write_text_model

_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}" + TURN + "{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}OPENER{{ call.function | tojson }}CLOSER{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}" + TURN + "assistant:{% endif %}"
)


def write_hermes_model(directory: Path) -> Path:
    template = _TEMPLATE.replace("OPENER", "<tool_call>").replace("CLOSER", "</tool_call>")
    return write_text_model(directory, template=template)


def write_mistral_model(directory: Path) -> Path:
    """Its opener is a special token, as Mistral's is."""
    template = _TEMPLATE.replace("OPENER", "[TOOL_CALLS] [").replace("CLOSER", "]")
    return write_text_model(directory, template=template, specials=["[TOOL_CALLS]"])


def write_llama_model(directory: Path) -> Path:
    template = _TEMPLATE.replace("OPENER", "<|python_tag|>").replace("CLOSER", "")
    return write_text_model(directory, template=template, specials=["<|python_tag|>"])


def write_thinking_model(directory: Path) -> Path:
    """Its template opens the thinking, unless `enable_thinking` is false: then it closes it at once."""
    template = _TEMPLATE.replace("OPENER", "<tool_call>").replace("CLOSER", "</tool_call>")
    ending = "assistant:{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>"
    return write_text_model(directory, template=template.replace("assistant:", ending + "{% endif %}"))
