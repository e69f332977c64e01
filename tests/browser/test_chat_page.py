"""The chat page in a real browser, over a router with a fake scheduler: what a person sees and does."""

from __future__ import annotations

import asyncio
from asyncio import to_thread as seen  # a person's hands and eyes block; the router's loop goes on
from pathlib import Path

import grpc
from selenium.webdriver.common.keys import Keys

from tests.browser.person import Page
from tests.fakes.router_stack import MODEL, Stack, in_loop_within, stack
from tests.fakes.scheduler import Attempt, hang

TEST_LIMIT_S = 120.0
CANARY = (
    """<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>&lt;b&gt; [a](javascript:1)"""
)


async def until_free(made: Stack, count: int) -> None:
    await made.scheduler.until(lambda: len(made.scheduler.cancelled) == count)
    await made.router.front.wait_idle()


def prompt_of(made: Stack, index: int = -1) -> str:
    return made.tokenizer.decode(list(made.scheduler.requests[index].prompt_token_ids))


@in_loop_within(TEST_LIMIT_S)
async def test_an_answer_is_seen_while_it_comes(model_dir: Path, page: Page) -> None:
    go_on = asyncio.Event()

    async def speak(attempt: Attempt) -> None:
        ids = made.ids("Hello there ✓")
        await attempt.scheduled()
        await attempt.tokens(0, ids[:5])
        await go_on.wait()
        await attempt.tokens(5, ids[5:])
        await attempt.tokens(len(ids), (), 1)
        await attempt.finished(len(ids))

    async with stack(model_dir, speak) as made:
        await seen(page.open, made.base_url)
        assert await seen(page.texts, "#model option") == [MODEL]
        await seen(page.type, "hi", Keys.SHIFT, Keys.ENTER, Keys.NULL, "you", Keys.ENTER)
        await seen(page.wait_for_answer, "Hello")
        assert await seen(lambda: page.is_running)
        assert (await seen(page.texts, "#tokens")) == ["5 tokens"]
        assert "first token after" in (await seen(page.texts, "#first"))[0]
        go_on.set()
        await seen(page.wait_for_answer, "Hello there ✓")
        await seen(page.wait, lambda: not page.is_running)
        num_tokens = len(made.ids("Hello there ✓")) + 1  # the end token counts
        assert await seen(page.texts, "#tokens") == [f"{num_tokens} tokens"]
        assert (await seen(page.texts, "#speed"))[0].endswith(" tokens/s")
        assert (await seen(page.texts, "#prompt"))[0].startswith("prompt ")
        assert await seen(page.texts, ".user .text") == ["hi\nyou"]
        assert "user: hi\nyou\n" in prompt_of(made)
        assert await seen(page.troubles) == []
        requested = await seen(page.run, "return performance.getEntriesByType('resource').map((one) => one.name)")
        assert requested
        assert all(name.startswith(made.base_url) for name in requested)


@in_loop_within(TEST_LIMIT_S)
async def test_stop_button_and_escape_free_what_the_request_held(model_dir: Path, page: Page) -> None:
    async with stack(model_dir, hang) as made:
        await seen(page.open, made.base_url)
        for count in (1, 2):
            await seen(page.type, "go on", Keys.ENTER)
            await seen(page.wait, lambda: page.is_running and page.texts(".assistant .text")[-1:] == ["x"])
            if count == 1:
                await seen(page.find("#stop").click)
            else:
                await seen(page.type, Keys.ESCAPE)
            await until_free(made, count)
            await seen(page.wait, lambda: not page.is_running)
            assert await seen(lambda: page.error) == ""
        assert await seen(page.texts, ".assistant .text") == ["x", "x"]


@in_loop_within(TEST_LIMIT_S)
async def test_markup_stays_text(model_dir: Path, page: Page) -> None:
    async with stack(model_dir) as made:
        made.say(CANARY)
        await seen(page.open, made.base_url)
        for reloaded in (False, True):
            if reloaded:
                await seen(page.reload)
            else:
                await seen(page.type, CANARY, Keys.ENTER)
            await seen(page.wait_for_answer, CANARY)
            assert await seen(page.texts, ".user .text") == [CANARY]
            assert await seen(page.texts, "#log :is(img, script, b, a)") == []
            assert await seen(page.run, "return document.title") == "Octavo"
            assert await seen(page.troubles) == []


@in_loop_within(TEST_LIMIT_S)
async def test_the_controls_reach_the_request_and_survive_a_reload(model_dir: Path, page: Page) -> None:
    async with stack(model_dir) as made:
        made.say("ok")
        await seen(page.open, made.base_url)
        for name, value in (("system", "Be short."), ("temperature", "0.5"), ("topP", "0.25"), ("maxTokens", "12")):
            await seen(page.set, name, value)
        await seen(page.reload)
        await seen(page.type, "one", Keys.ENTER)
        await seen(page.wait_for_answer, "ok")
        sampling = made.scheduler.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 12)
        assert "system: Be short.\n" in prompt_of(made)
        await seen(page.set, "temperature", "3")  # out of range: nothing is sent
        await seen(page.type, "two", Keys.ENTER)
        assert len(made.scheduler.requests) == 1
        await seen(page.set, "temperature", "0")
        await seen(page.type, Keys.ENTER)
        await seen(page.wait, lambda: len(page.texts(".assistant .text")) == 2 and not page.is_running)
        conversation = prompt_of(made)
        assert all(turn in conversation for turn in ("user: one\n", "assistant: ok\n", "user: two\n"))


@in_loop_within(TEST_LIMIT_S)
async def test_a_reload_ends_the_answer_and_keeps_the_conversation(model_dir: Path, page: Page) -> None:
    async with stack(model_dir) as made:
        made.say("first")
        await seen(page.open, made.base_url)
        await seen(page.type, "one", Keys.ENTER)
        await seen(page.wait_for_answer, "first")
        await seen(page.wait, lambda: not page.is_running)
        made.scheduler.behave = hang
        await seen(page.type, "two", Keys.ENTER)
        await seen(page.wait_for_answer, "x")
        await seen(page.reload)
        await until_free(made, 1)
        assert await seen(page.texts, ".message .text") == ["one", "first"]
        await seen(page.find("#new").click)
        assert await seen(page.texts, ".message") == []
        await seen(page.reload)
        assert await seen(page.texts, ".message") == []


@in_loop_within(TEST_LIMIT_S)
async def test_a_new_chat_ends_the_answer_that_runs(model_dir: Path, page: Page) -> None:
    async with stack(model_dir, hang) as made:
        await seen(page.open, made.base_url)
        await seen(page.type, "one", Keys.ENTER)
        await seen(page.wait_for_answer, "x")
        await seen(page.find("#new").click)
        await until_free(made, 1)
        await seen(page.wait, lambda: not page.is_running)
        assert await seen(page.texts, ".message") == []


@in_loop_within(TEST_LIMIT_S)
async def test_errors_are_said_and_the_question_comes_back(model_dir: Path, page: Page) -> None:
    async def fail(attempt: Attempt) -> None:
        await attempt.fail(grpc.StatusCode.INVALID_ARGUMENT, "the <b>reason</b>")

    async with stack(model_dir, fail) as made:
        await seen(page.open, made.base_url)
        await seen(page.type, "ask me", Keys.ENTER)
        await seen(page.wait, lambda: "<b>reason</b>" in page.error)
        assert await seen(lambda: page.find("#input").get_property("value")) == "ask me"
        assert await seen(page.texts, ".message") == []
        made.say("now")
        await seen(page.type, Keys.ENTER)
        await seen(page.wait_for_answer, "now")
        assert await seen(lambda: page.error) == ""


@in_loop_within(TEST_LIMIT_S)
async def test_a_lost_connection_is_said(model_dir: Path, page: Page) -> None:
    async with stack(model_dir, hang) as made:
        await seen(page.open, made.base_url)
        await seen(page.type, "hi", Keys.ENTER)
        await seen(page.wait_for_answer, "x")
        await made.router.stop()
        await seen(page.wait, lambda: page.error and not page.is_running)
        assert await seen(page.texts, ".assistant .text") == ["x"]


@in_loop_within(TEST_LIMIT_S)
async def test_the_key_stays_in_the_tab(model_dir: Path, page: Page) -> None:
    async with stack(model_dir, api_key="s3cret-key") as made:
        made.say("ok")
        # The browser asks a person for the key, to show the page; the page asks for it again, to speak with it.
        await seen(page.open, made.base_url.replace("//", "//me:s3cret-key@"))
        assert "key" in (await seen(lambda: page.error)).lower()
        await seen(page.set, "key", "s3cret-key")
        await seen(page.wait, lambda: page.texts("#model option") == [MODEL])
        await seen(page.reload)
        await seen(page.type, "hi", Keys.ENTER)
        await seen(page.wait_for_answer, "ok")
        kept = await seen(
            page.run, "return [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]"
        )
        assert "s3cret-key" in kept[0]
        assert kept[1:] == ["{}", ""]


@in_loop_within(TEST_LIMIT_S)
async def test_colours_follow_the_system_or_the_choice(model_dir: Path, page: Page) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"

    def prefer(scheme: str) -> None:
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})

    async with stack(model_dir) as made:
        await seen(page.open, made.base_url)
        shown = []
        for scheme, theme in (("light", ""), ("dark", ""), ("light", "dark"), ("dark", "light")):
            await seen(prefer, scheme)
            await seen(
                page.run,
                f"const field = document.querySelector('[name=theme]'); field.value = '{theme}';"
                "field.dispatchEvent(new Event('input', {bubbles: true}))",
            )
            shown.append(await seen(page.run, ground))
        light, dark = shown[:2]
        assert light != dark
        assert shown[2:] == [dark, light]
