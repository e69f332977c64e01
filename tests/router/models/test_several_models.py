"""One router, several models: each with its own text, aliases by weight, and changes while serving."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo.client import AsyncClient
from octavo.internal.v1 import scheduler_pb2
from octavo.options import OptionError
from octavo.process import StartError
from router.config import RouterConfig
from router.models.catalogue import Catalogue
from router.models.watch import ModelsWatch
from tests.fakes.router_stack import MODEL, Stack, in_loop, model_info, stack, write_text_model
from tests.router.chat_models import write_hermes_model

ALIASES = "[aliases.chat]\nsticky = 'user'\nweights = {{ tiny = {}, coder = {} }}\n"


def write_models(path: Path, coder: Path, weights: tuple[int, int] = (1, 1)) -> Path:
    path.write_text(f"models.coder = '{coder}'\n" + ALIASES.format(*weights))
    return path


@pytest.fixture
def coder_dir(tmp_path: Path) -> Path:
    """Another vocabulary: its ids differ from those of the first model."""
    return write_hermes_model(tmp_path / "coder")


async def offer(made: Stack, *directories: tuple[str, Path]) -> None:
    """Let workers offer more models, and wait until the router knows."""
    made.scheduler.others = [model_info(directory, name) for name, directory in directories]
    changed = asyncio.Event()
    made.router.scheduler.on_change(lambda state: changed.set())
    made.scheduler.announce()
    await changed.wait()


async def tell_aliases(made: Stack, changed_at_ns: int, *aliases: scheduler_pb2.Alias) -> None:
    """Let operators' aliases be these, and wait until the router knows."""
    made.scheduler.aliases = scheduler_pb2.AliasTable(changed_at_ns=changed_at_ns, aliases=aliases)
    changed = asyncio.Event()
    made.router.scheduler.on_change(lambda state: changed.set())
    made.scheduler.announce()
    await changed.wait()


async def ask(made: Stack, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = await made.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **body}
    )
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


@in_loop
async def test_each_model_has_its_own_text(tmp_path: Path) -> None:
    other = write_text_model(tmp_path / "other", template="{% for m in messages %}<{{ m.content }}>{% endfor %}")
    file = tmp_path / "models.toml"
    file.write_text(f"models.other = '{other}'\n")
    async with stack(write_text_model(tmp_path / "first"), models=str(file)) as made:
        made.say("ok")
        refused = (await ask(made, 503, model="other"))["error"]
        assert "no worker has offered the model other" in refused["message"]
        await offer(made, ("other", other))
        assert (await ask(made, model="other"))["model"] == "other"
        assert (await ask(made))["model"] == MODEL
        first, second = made.scheduler.requests
        assert (first.model, second.model) == ("other", MODEL)
        assert made.tokenizer.decode(list(first.prompt_token_ids)) == "<hi>"
        assert made.tokenizer.decode(list(second.prompt_token_ids)) != "<hi>"
        error = (await ask(made, 404, model="third"))["error"]
        assert "tiny, other" in error["message"]
        listed = (await made.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [MODEL, "other"]
        tokens = (await made.http.post("/tokenize", json={"model": "other", "prompt": "a"})).json()["tokens"]
        assert tokens == made.ids("a")
        ready = (await made.http.get("/ready")).json()
        assert ready["reasons"] == {MODEL: "", "other": ""}
        metrics = (await made.http.get("/metrics")).text
        assert 'model="other"' in metrics or 'model_name="other"' in metrics


@in_loop
async def test_models_of_the_command_line_are_no_files_business(tmp_path: Path, coder_dir: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f"[aliases.chat]\nweights = {{ {MODEL} = 1, coder = 1 }}\n")
    async with stack(
        write_text_model(tmp_path / "first"), models=str(file), further_models=(f"coder={coder_dir}",)
    ) as made:
        made.say("ok")
        await offer(made, ("coder", coder_dir))
        assert (await ask(made, model="coder"))["model"] == "coder"
        assert list(made.router.front.catalogue.aliases) == ["chat"]
    file.write_text(f"models.coder = '{coder_dir}'\n")
    with pytest.raises(StartError, match=r"models\.coder is a model of the command line"):
        async with stack(
            write_text_model(tmp_path / "again"), models=str(file), further_models=(f"coder={coder_dir}",)
        ):
            pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("coder",), "--model coder: is not NAME=MODEL"),
        (("=/m",), "is not NAME=MODEL"),
        (("a=/m", "a=/n"), "--model a=/n: a is another model's name too"),
        (("base=/m",), "--model base=/m: base is another model's name too"),
    ],
)
def test_further_models_are_named(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        RouterConfig(model="/models/base", further_models=words)
    found = RouterConfig(model="/models/base", further_models=("a=/m", "b=hub/n=x"))
    assert found.further_sources == {"a": "/m", "b": "hub/n=x"}


@in_loop
async def test_an_alias_keeps_a_user_with_one_model(tmp_path: Path, coder_dir: Path) -> None:
    file = write_models(tmp_path / "models.toml", coder_dir)
    async with stack(write_text_model(tmp_path / "first"), models=str(file)) as made:
        made.say("ok")
        early = {(await ask(made, model="chat", user=str(user)))["model"] for user in range(12)}
        assert early == {MODEL}, "what no worker offers yet gets no requests"
        await offer(made, ("coder", coder_dir))
        by_user = {user: (await ask(made, model="chat", user=user))["model"] for user in map(str, range(12))}
        assert set(by_user.values()) == {MODEL, "coder"}
        for user, model in by_user.items():
            again = await ask(made, model="chat", user=user, messages=[{"role": "user", "content": "x"}])
            assert again["model"] == model
        async with AsyncClient(made.grpc_address, model="chat") as client:
            for user in ("0", "1", "2", "3"):
                result = await client.chat([{"role": "user", "content": "hi"}], user=user)
                assert result.model == by_user[user]
            served = {model.name: model.weights for model in await client.models()}
            assert served == {MODEL: {}, "coder": {}, "chat": {MODEL: 1.0, "coder": 1.0}}
        (alias,) = [m for m in (await made.http.get("/v1/models")).json()["data"] if m["id"] == "chat"]
        assert alias["weights"] == {MODEL: 1.0, "coder": 1.0}
        assert (await made.http.get("/v1/models/chat")).json() == alias


@in_loop
async def test_a_changed_file_is_taken_and_a_bad_one_is_not(
    tmp_path: Path, coder_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = write_models(tmp_path / "models.toml", coder_dir)
    catalogue = Catalogue("tiny")
    watch = ModelsWatch(file, catalogue, poll_s=0.01)
    watch.load()()
    assert catalogue.names == ("tiny", "coder")
    text = catalogue.text("coder")
    changed = asyncio.Event()
    running = asyncio.create_task(watch.run(changed.set))
    write_models(file, coder_dir, (0, 1))
    await changed.wait()
    assert catalogue.aliases["chat"].weights == {"coder": 1.0}
    assert catalogue.text("coder") is text, "a text that is there already is not read again"
    changed.clear()

    file.write_text("nonsense")
    while "is not taken" not in caplog.text:
        await asyncio.sleep(0)
    assert catalogue.aliases["chat"].weights == {"coder": 1.0}
    file.write_text("")
    await changed.wait()
    assert (catalogue.names, dict(catalogue.aliases)) == (("tiny",), {})
    running.cancel()


@in_loop
async def test_a_bad_file_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text("models.x = '/nowhere/at/all'")
    with pytest.raises(Exception, match="nowhere"):
        async with stack(write_text_model(tmp_path / "first"), models=str(file)):
            pass


@in_loop
async def test_operators_change_aliases_while_serving(tmp_path: Path, coder_dir: Path) -> None:
    file = write_models(tmp_path / "models.toml", coder_dir, (1, 0))
    async with stack(write_text_model(tmp_path / "first"), models=str(file)) as made:
        made.say("ok")
        await offer(made, ("coder", coder_dir))
        assert (await ask(made, model="chat"))["model"] == MODEL
        await tell_aliases(
            made,
            1,
            scheduler_pb2.Alias(name="chat", weights={"coder": 1.0, "elsewhere": 7.0}),
            scheduler_pb2.Alias(name="new", weights={"coder": 1.0}, sticky=scheduler_pb2.STICKINESS_USER),
            scheduler_pb2.Alias(name="lost", weights={"elsewhere": 1.0}),
            scheduler_pb2.Alias(name=MODEL, weights={"coder": 1.0}),
        )
        models = [(await ask(made, model=name))["model"] for name in ("chat", "new", MODEL)]
        assert models == ["coder", "coder", MODEL]
        assert made.router.front.catalogue.aliases["new"].sticky == "user"
        assert "served: tiny, coder, chat, new" in (await ask(made, 404, model="lost"))["error"]["message"]
        async with AsyncClient(made.grpc_address) as client:
            served = {model.name: model.weights for model in await client.models()}
            assert served == {MODEL: {}, "coder": {}, "chat": {"coder": 1.0}, "new": {"coder": 1.0}}

        await tell_aliases(made, 2)
        assert (await ask(made, model="chat"))["model"] == MODEL, "the file's again"
        await ask(made, 404, model="new")


@in_loop
async def test_a_scheduler_that_was_started_anew_learns_the_aliases(tmp_path: Path) -> None:
    async with stack(write_text_model(tmp_path)) as made:
        await tell_aliases(made, 5, scheduler_pb2.Alias(name="a", weights={MODEL: 1.0}))
        table = made.scheduler.aliases
        await made.scheduler.stop()
        await made.scheduler.start(made.scheduler_port)
        await made.scheduler.until(lambda: len(made.scheduler.watches) == 2)
        first, again = made.scheduler.watches
        assert first.aliases.changed_at_ns == 0
        assert again.aliases == table
