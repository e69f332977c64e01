"""Prompts: what a client sends, to the token ids that a model gets.

Chat. The messages are rendered by the model's template and the text is encoded once, split at the control tokens that
the *template* wrote and nowhere else. `provenance` tells which those are; `PlainTextEncoder` encodes all other text,
whatever it spells, as ordinary text. So no message, tool result or tool name can open a turn or end one. Where
messages hold no control string, the ids equal transformers' apply_chat_template: never is a message encoded on its
own. BOS comes from the template alone, so there is never a second one.

Completions. Text may hold control strings and BOS is added where the tokenizer does so; or token ids, checked one by
one. Knows no sampling and no wire. Encoding a long prompt takes long: callers on an event loop run `PromptBuilder` in
a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.errors import InvalidRequest, RequestTooLarge, check_text, show_value
from router.sampling_rules import check_token_id
from router.text.chat_template import ChatTemplate, ChatTemplates
from router.text.messages import normalize_messages, normalize_tools, plain_data, write_out_calls
from router.text.provenance import ControlStrings, Disguise, map_strings, strings_of
from router.text.tokenizer import PlainTextEncoder, Span, Tokenizer, control_strings

MAX_PROMPTS = 2048
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_DEFAULT_SETTINGS = {"verbosity": "medium"}
"""What OpenAI takes where a request says nothing: to a template without such a setting it says nothing either."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text they came from (None for a prompt given as ids)."""

    token_ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True)
class ChatOptions:
    """How to render a conversation beside its messages."""

    tools: object = None
    documents: object = None
    template_kwargs: Mapping[str, object] | None = None
    """More variables for the template, e.g. {"enable_thinking": False}."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables that a request names as fields of its own; refused where the template does not know them."""
    add_generation_prompt: bool | None = None
    """Open an assistant turn at the end. Default: unless the final message is continued."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model goes on with it."""


class PromptBuilder:
    """Builds prompts for one model. Immutable after start; safe in several threads."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates, *, vocab_size: int, max_model_len: int) -> None:
        """`vocab_size` is the model's, the limit for token ids; `max_model_len` bounds the text worth encoding."""
        self._tokenizer = tokenizer
        self._templates = templates
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._chats = {id(template): _ChatEncoder(tokenizer, template) for template in templates.named.values()}

    @property
    def max_text_chars(self) -> int:
        """No longer text fits into the context, whatever it says."""
        return self._max_model_len * self._tokenizer.longest_token_chars

    def chat(self, messages: object, options: ChatOptions | None = None, *, add_special_tokens: bool = False) -> Prompt:
        """The prompt of a conversation. Raises `InvalidRequest` naming the message.

        `add_special_tokens` puts around it what the tokenizer puts around a text, but no second BOS.
        """
        options = options or ChatOptions()
        tools = normalize_tools(options.tools)
        template = self._templates.pick(has_tools=tools is not None)
        encoder = self._chats[id(template)]
        conversation = normalize_messages(messages, template.content_use, encoder.accepts_role)
        if not template.knows("tool_calls"):
            conversation = [write_out_calls(message, template.content_use) for message in conversation]
        variables = encoder.variables(conversation, tools, options)
        self._refuse_long("messages", sum(map(len, strings_of([conversation, tools]))))
        text, spans = encoder.render(variables, continued=options.continue_final_message)
        self._refuse_long("messages", len(text))
        ids = encoder.encode(text, spans)
        if not ids:
            raise InvalidRequest("messages", "messages: the chat template made an empty prompt of them")
        return Prompt(tuple(self._tokenizer.enclose(ids) if add_special_tokens else ids), text)

    def completion(self, prompt: object, *, field: str = "prompt", add_special_tokens: bool = True) -> Prompt:
        """One prompt, text or token ids. Raises `InvalidRequest` naming `field`, and the index of a bad id."""
        if isinstance(prompt, str):
            text = check_text(field, prompt)
            self._refuse_long(field, len(text))
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            if not ids:
                raise InvalidRequest(field, f"{field} is empty and this model's tokenizer adds no token to it")
            return Prompt(tuple(ids), text)
        if not isinstance(prompt, (list, tuple)):
            raise InvalidRequest(field, f"{field} must be text or a list of token ids, got {show_value(prompt)}")
        if not prompt:
            raise InvalidRequest(field, f"{field} must hold at least one token id, got none")
        if len(prompt) > self._max_model_len:
            self._refuse_tokens(field, len(prompt))
        if not all(type(item) is int and 0 <= item < self._vocab_size for item in prompt):
            for index, item in enumerate(prompt):
                check_token_id(f"{field}[{index}]", item, self._vocab_size)
        return Prompt(tuple(prompt), None)

    def completions(self, prompt: object, *, add_special_tokens: bool = True) -> list[Prompt]:
        """All prompts of a completions request: text, ids, or a list of either. One bad item refuses them all."""
        if not isinstance(prompt, (list, tuple)) or (prompt and not isinstance(prompt[0], (str, list, tuple))):
            return [self.completion(prompt, add_special_tokens=add_special_tokens)]
        if not 1 <= len(prompt) <= MAX_PROMPTS:
            raise InvalidRequest("prompt", f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompt)}")
        kind = str if isinstance(prompt[0], str) else (list, tuple)
        for index, item in enumerate(prompt):
            if not isinstance(item, kind):
                raise InvalidRequest(
                    f"prompt[{index}]", f"prompt[{index}] must be of the same kind as prompt[0], got {show_value(item)}"
                )
        return [
            self.completion(item, field=f"prompt[{index}]", add_special_tokens=add_special_tokens)
            for index, item in enumerate(prompt)
        ]

    def _refuse_long(self, field: str, num_chars: int) -> None:
        """Refuse text that cannot fit before spending the time to encode it."""
        if num_chars > self.max_text_chars:
            raise RequestTooLarge(
                field,
                f"{field} has {num_chars} characters; at most {self.max_text_chars} can fit into the context of "
                f"{self._max_model_len} tokens",
            )

    def _refuse_tokens(self, field: str, num_tokens: int) -> None:
        raise InvalidRequest(
            field,
            f"{field} has {num_tokens} tokens; the context has {self._max_model_len}; shorten the prompt",
        )


class _ChatEncoder:
    """One template with the tokenizer: renders, finds the template's own control tokens, encodes."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._controls = control_strings(tokenizer, template.literal_text)
        self._control_strings = ControlStrings(self._controls, template.constants)
        self._plain = PlainTextEncoder(tokenizer, self._controls)

    def accepts_role(self, role: str) -> bool:
        """Roles beyond the standard ones: those the template names, and those that cannot make up a control token."""
        return role in self.template.constants or not any(role in control for control in self._controls)

    def variables(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: ChatOptions
    ) -> dict[str, Any]:
        """Everything the template sees, by name."""
        for name, said in options.settings.items():
            if not self.template.knows(name) and said != _DEFAULT_SETTINGS.get(name):
                raise InvalidRequest(name, f"{name}: this model's chat template has no such setting; leave it out")
        extra = plain_data("chat_template_kwargs", options.template_kwargs or {})
        reserved = _OWN_VARIABLES | self._tokenizer.special_tokens.keys()
        if not isinstance(extra, dict) or reserved & extra.keys():
            names = ", ".join(sorted(reserved))
            raise InvalidRequest(
                "chat_template_kwargs", f"chat_template_kwargs must be an object without the names {names}"
            )
        opens_turn = options.add_generation_prompt
        if opens_turn and options.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt",
                "add_generation_prompt must be false when continue_final_message is true: the turn is open already",
            )
        documents = plain_data("documents", options.documents)
        if documents and not self.template.knows("documents"):
            raise InvalidRequest(
                "documents", "documents: this model's chat template shows none to the model; put them into a message"
            )
        return {
            **self._tokenizer.special_tokens,
            **options.settings,
            **extra,
            "messages": [{**message, "role": self._known_role(message["role"])} for message in messages],
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": not options.continue_final_message if opens_turn is None else opens_turn,
        }

    def _known_role(self, role: str) -> str:
        """A "developer" is a "system" to a template that knows none, a "function" a "tool"."""
        if role == "developer" and "developer" not in self.template.literal_text:
            return "system"
        if role == "function" and "function" not in self.template.constants and "tool" in self.template.constants:
            return "tool"
        return role

    def render(self, variables: dict[str, Any], *, continued: bool) -> tuple[str, list[tuple[int, int]]]:
        """(prompt text, spans of the control tokens the template wrote in it)."""
        strings = list(strings_of({k: v for k, v in variables.items() if k not in self._tokenizer.special_tokens}))
        disguise = Disguise(self._control_strings, strings, self.template.source)
        ending = disguise.tag if continued else None
        plain = self._render_once(variables, ending)
        if not disguise.needed:
            return plain, disguise.spans(plain)
        try:
            full = self._render_once(self._change(variables, disguise.full), ending)
        except InvalidRequest:
            full = ""  # the template saw the disguise and took it for a mistake
        if disguise.lines_up(full, plain):
            return plain, disguise.spans(full)
        try:
            return disguise.undo(self._render_once(self._change(variables, disguise.readable), ending))
        except InvalidRequest as error:
            raise InvalidRequest(error.field, disguise.undo(error.message)[0]) from None

    def encode(self, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Token ids with control tokens at the spans only."""
        return self._plain.encode(text, (Span(start, end, text[start:end]) for start, end in spans))

    def _change(self, variables: dict[str, Any], change: Any) -> dict[str, Any]:
        """The variables with all that came from the client changed; names and the model's special tokens stay."""
        own = self._tokenizer.special_tokens
        return {k: v if own.get(k) == v else map_strings(v, change) for k, v in variables.items()}

    def _render_once(self, variables: dict[str, Any], ending: str | None) -> str:
        """One rendering. With `ending`, the last message carries it, and the text is cut where it comes out."""
        if ending is None:
            return self.template.render(variables)
        *before, last = variables["messages"]
        text = self.template.render({**variables, "messages": [*before, _with_ending(last, f"{ending} ")]})
        at = text.rfind(ending)
        if at < 0:
            raise InvalidRequest(
                "continue_final_message", "continue_final_message: the chat template does not show the final message"
            )
        # A template that trims has trimmed the blank after the mark, so the blanks before it go too.
        return text[:at] if text.startswith(f"{ending} ", at) else text[:at].rstrip()


def _with_ending(message: dict[str, Any], ending: str) -> dict[str, Any]:
    """The message with `ending` at the end of its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + ending}
    if isinstance(content, list) and content:
        *before, last = content
        return {**message, "content": [*before, {**last, "text": last["text"] + ending}]}
    raise InvalidRequest("continue_final_message", "continue_final_message: the final message has no text to continue")
