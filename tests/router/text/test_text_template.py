"""Finding templates, refusing broken ones, and ending those that would not end."""

import json
import time
from pathlib import Path

import pytest
from conftest import TextModel, load_text_model
from text_models import CHATML, GEMMA, LLAMA3, MISTRAL, PARTS_ONLY, QWEN, smollm_style

from router.errors import ErrorKind, InvalidRequest
from router.text.chat_template import ChatTemplate, ChatTemplates, TemplateFileError
from router.text.prompt import ChatOptions

USER = [{"role": "user", "content": "hi"}]


def model_with(directory: Path, template: object, jinja: dict[str, str] | None = None) -> TextModel:
    smollm_style(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    if template is not None:
        config["chat_template"] = template
    path.write_text(json.dumps(config))
    for name, source in (jinja or {}).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(source)
    return load_text_model("custom", directory)


def test_f20_no_template_says_how_to_supply_one(tmp_path: Path) -> None:
    model = model_with(tmp_path / "m", None)
    with pytest.raises(InvalidRequest, match=r"chat_template\.jinja") as caught:
        model.prompts.chat(USER)
    assert caught.value.codes.http_status == 400
    assert model.prompts.completion("still works").token_ids


def test_f20_jinja_file_is_found_and_wins(tmp_path: Path) -> None:
    assert model_with(tmp_path / "a", None, {"chat_template.jinja": "FILE"}).prompts.chat(USER).text == "FILE"
    assert model_with(tmp_path / "b", "CONFIG", {"chat_template.jinja": "FILE"}).prompts.chat(USER).text == "FILE"


def test_f20_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    model = model_with(tmp_path / "a", named)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert model.prompts.chat(USER).text == "D"
    assert model.prompts.chat(USER, ChatOptions(tools=tools)).text == "T"
    extra = model_with(tmp_path / "b", "D", {"additional_chat_templates/tool_use.jinja": "X"})
    assert extra.prompts.chat(USER, ChatOptions(tools=tools)).text == "X"
    with pytest.raises(InvalidRequest, match="rag"):
        model_with(tmp_path / "c", [{"name": "rag", "template": "R"}]).prompts.chat(USER)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("ok\n{% if %}", "line 2"),
        ("a\nb\n{{ x | no_such_filter }}", "line 3.*no_such_filter"),
        ("{% for x in y %}", "line 1"),
        ("{{ 'open", "line 1"),
    ],
)
def test_f20_broken_template_stops_the_start_with_its_line(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(TemplateFileError, match=said) as caught:
        model_with(tmp_path / "m", None, {"chat_template.jinja": source})
    assert "chat_template.jinja" in str(caught.value)


@pytest.mark.parametrize("entry", [5, [{"name": "x"}], ["text"], {"default": 1}])
def test_malformed_entry_stops_the_start(tmp_path: Path, entry: object) -> None:
    with pytest.raises(TemplateFileError, match=r"tokenizer_config\.json"):
        model_with(tmp_path / "m", entry)


ENDLESS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "doubling ~": "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling +": "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling list": "{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling block": (
        "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}"
    ),
    "squaring": "{% set n = namespace(x=7) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "repeat": "{{ 'a' * 10000000000 }}",
    "repeat list": "{{ [1] * 10000000000 }}",
    "center": "{{ 'a'.center(10000000000) }}",
    "center filter": "{{ 'a' | center(10000000000) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "format argument": "{{ '{:>{}}'.format(1, 10000000000) }}",
    "join": "{{ range(99999) | list | join('a' * 100000) }}",
    "join method": "{{ ('a' * 100000).join(['b'] * 99999) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "indent": "{{ {'a': [1]} | tojson(indent=10000000000) }}",
    "output": "{% set x = 'a' * 1000000 %}{% for a in range(99999) %}{{ x }}{% endfor %}",
    "range": "{{ range(10000000000) | list }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_f20_templates_without_end_are_ended(name: str) -> None:
    template = ChatTemplate(ENDLESS[name], "test")
    start_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="template"):
        template.render({})
    assert time.thread_time() - start_s < 5


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{{ lipsum(3) }}",
        "{% include 'other' %}",
        "{{ dict.__class__.mro() }}",
    ],
)
def test_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest, match="template"):
        ChatTemplate(source, "test").render({"messages": []})


def test_bounds_leave_ordinary_templates_as_they_are() -> None:
    source = (
        "{% for x in items if x %}{{ loop.index }}/{{ loop.length }}{{ x ~ 'a' ~ (1 ~ none) }}{% if not loop.last %},"
        "{% else %}.{% endif %}{% else %}none{% endfor %}"
        "{% for x in tree recursive %}{{ x.n }}{{ loop(x.c) if x.c }}{% endfor %}"
        "{% for x in missing %}{% else %}!{% endfor %}{% for k, v in d.items() %}{{ k }}{{ v }}{% break %}{% endfor %}"
        "{{ 7 % 4 }}{{ 2 ** 10 }}{{ '%s-%d' % ('a', 3) }}{{ [1] + [2] }}{{ 'ab' * 2 }}{{ '{0:>4}'.format('x') }}"
        "{{ 'x' | center(3) }}{{ [1, 2] | join('-') }}{% generation %}g{% endgeneration %}{{ 20000000000 | tojson }}"
    )
    variables = {"items": [1, 0, 2], "tree": [{"n": 1, "c": [{"n": 2}]}], "d": {"k": 1, "l": 2}}
    expected = "1/21a1None,2/22a1None.12!k131024a-3[1, 2]abab   x x 1-2g20000000000"
    assert ChatTemplate(source, "test").render(variables) == expected


def test_a_render_error_names_the_line() -> None:
    with pytest.raises(InvalidRequest, match=r"line 3.*roles must alternate") as caught:
        ChatTemplate("a\nb\n{{ raise_exception('roles must alternate') }}", "test").render({})
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("source", "iterates", "tells"),
    [
        (CHATML, False, False),
        (LLAMA3, False, True),
        (MISTRAL, False, False),
        (GEMMA, True, True),
        (QWEN, False, True),
        (PARTS_ONLY, True, False),
        (
            "{% for m in messages %}{% set c = m['content'] %}{% for p in c | list %}{{ p }}{% endfor %}{% endfor %}",
            True,
            False,
        ),
        (
            "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}{{ show(m.content) }}",
            True,
            False,
        ),
    ],
)
def test_content_use_is_read_off_the_template(source: str, iterates: bool, tells: bool) -> None:
    use = ChatTemplate(source, "test").content_use
    assert (use.iterates_parts, use.tells_types_apart) == (iterates, tells)


def test_loading_without_a_template_is_fine(tmp_path: Path) -> None:
    assert ChatTemplates.load(tmp_path, {}).named == {}
