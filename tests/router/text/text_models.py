"""Small model directories in several styles: a tokenizer trained on the spot, with its family's chat template.

Each has what makes its family hard: digits split one by one, merges ignored for whole words, a blank put before the
first word only or before every piece, bytes as fallback, tokens not flagged special, control tokens in the vocabulary.
"""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it? Yes: 1234567 times!",
    "def main():\n    return {'a': [1, 2, 3]}  # comment <b>bold</b> a < b > c\n\n\n",
    "Größe, naïve café, Ελληνικά, русский текст, 中文字符, 日本語, 한국어, العربية, emoji 🌶👩‍🚀🇩🇪",
    'system user assistant tool You are a helpful assistant. <tool_call> {"name": "f"} </tool_call>',
    "what is the weather in Paris today? Let me think about it step by step.",
] * 3

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a small model<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if tools is not none and tools %}
    {{- "<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\nTools:\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n<tool_call>\n{\\"name\\": <name>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
PARTS_ONLY = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _write(directory: Path, tokenizer: Tokenizer, template: str | None, **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def _byte_level(special: list[str], *, vocab_size: int = 600, split: str | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=split is not None))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = (
        pre_tokenizers.Digits(individual_digits=True)
        if split is None
        else pre_tokenizers.Split(Regex(split), "isolated")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def smollm_style(directory: Path) -> Path:
    """ChatML; control tokens are part of the model's own vocabulary."""
    tokenizer = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"])
    return _write(
        directory, tokenizer, CHATML, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )


def llama3_style(directory: Path) -> Path:
    """A regular expression splits, whole words ignore merges, BOS is added, control tokens follow the vocabulary."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    split = words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = _byte_level([], split=split)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens(names)
    bos_id = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A $B",
                special_tokens=[("<|begin_of_text|>", bos_id)],
            ),
        ]
    )
    return _write(directory, tokenizer, LLAMA3, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def qwen_style(directory: Path) -> Path:
    """Tools and thinking; NFC; tokens such as <tool_call> are added without being flagged special."""
    tokenizer = _byte_level([], vocab_size=500)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    plain = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<|fim_pad|>"]
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in [*plain, "<ordinary_word>"]])
    return _write(
        directory,
        tokenizer,
        QWEN,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        add_bos_token=False,
    )


def _sentencepiece(special: list[str], corpus_mark: Callable[[str], str]) -> Tokenizer:
    """BPE over characters with ▁ for blanks and bytes as fallback, as converted from SentencePiece."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    latin = [text for text in CORPUS if text.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*special, *bytes_], show_progress=False)
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    trained.train_from_iterator([corpus_mark(text) for text in latin], trainer)
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in state["merges"]]
    model = models.BPE(vocab=state["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    bos = next(name for name in special if name in ("<s>", "<bos>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def mistral_style(directory: Path) -> Path:
    """Llama-2's tokenizer: a blank before the first word, one blank dropped when decoding, BOS added."""
    tokenizer = _sentencepiece(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], lambda text: text)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _write(
        directory,
        tokenizer,
        MISTRAL,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        add_bos_token=True,
        add_eos_token=False,
    )


def legacy_llama_style(directory: Path) -> Path:
    """The older conversion: a normalizer puts a blank before *every* piece between control tokens."""
    tokenizer = _sentencepiece(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], lambda text: text)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _write(
        directory, tokenizer, MISTRAL, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )


def gemma_style(directory: Path) -> Path:
    """No blank added anywhere; runs of newlines and HTML tags are added tokens that any text may use."""
    tokenizer = _sentencepiece(
        ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"], lambda text: text
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ["\n\n", "\n\n\n", "<b>", "</b>"]])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _write(
        directory, tokenizer, GEMMA, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", add_bos_token=True
    )


def parts_style(directory: Path) -> Path:
    """ChatML whose template loops over parts and never asks for a string."""
    tokenizer = _byte_level(["<|im_start|>", "<|im_end|>"], vocab_size=400)
    return _write(directory, tokenizer, PARTS_ONLY, eos_token="<|im_end|>")


STYLES: dict[str, Callable[[Path], Path]] = {
    "smollm": smollm_style,
    "llama3": llama3_style,
    "qwen": qwen_style,
    "mistral": mistral_style,
    "legacy_llama": legacy_llama_style,
    "gemma": gemma_style,
    "parts": parts_style,
}
