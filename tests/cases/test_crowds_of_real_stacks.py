"""Many requests at once on a pool that is too small: each gets what it gets alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from octavo import AsyncClient, Client
from tests.cases.asking import Asker
from tests.cases.conftest import BLOCK_SIZE, CHUNK_TOKENS
from tests.e2e.stack import eventually

MOST_LONG_BEFORE_A_SHORT = 4

SEEDED: dict[str, Any] = {"seed": 42, "temperature": 0.8, "max_tokens": 32, "ignore_eos": True}


async def ids_of(client: AsyncClient, prompt: str, **options: Any) -> list[list[int]]:
    answer = await client.generate(prompt, **options)
    return [list(choice.token_ids) for choice in answer.choices]


def test_f10_a_seed_belongs_to_its_request(crowd: Asker) -> None:
    async def ask() -> None:
        async with AsyncClient(crowd.stack.grpc) as client:
            alone = await ids_of(client, "Story", **SEEDED)
            unseeded = {**SEEDED, "seed": None}
            del unseeded["seed"]
            beside = await asyncio.gather(*(ids_of(client, "Story", **one) for one in (SEEDED, unseeded, SEEDED)))
            assert beside[0] == beside[2] == alone
            triple = await ids_of(client, "Story", **SEEDED, n=3)
            assert triple == await ids_of(client, "Story", **SEEDED, n=3)
            assert triple[0] == alone[0]
            assert len({tuple(ids) for ids in triple}) == 3

    asyncio.run(ask())


def test_f36_preemption_is_invisible(crowd: Asker) -> None:
    options: dict[str, Any] = {
        "max_tokens": 150,
        "min_tokens": 140,
        "presence_penalty": 1.0,
        "logprobs": 2,
        "stop": ["zzzz"],
    }

    async def ask(client: AsyncClient, number: int) -> object:
        sampling: dict[str, Any] = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
        priority = 1 if number < 4 else 0
        answer = await client.generate(f"Number {number}", **options, **sampling, priority=priority)
        (choice,) = answer.choices
        logprobs = [(entry.token_id, entry.logprob) for entry in choice.logprobs]
        return answer.text, list(choice.token_ids), choice.finish_reason, logprobs, answer.usage.completion_tokens

    async def run() -> tuple[list[object], list[object]]:
        async with AsyncClient(crowd.stack.grpc) as client:
            first = [asyncio.ensure_future(ask(client, number)) for number in range(4)]
            # Room is kept for the growth of those that run, so that better work alone displaces them.
            running = "some run whom better ones can displace"
            await asyncio.to_thread(eventually, lambda: crowd.stack.replicas()[0].num_running >= 2, 60, running)
            together = await asyncio.gather(*first, *(ask(client, number) for number in range(4, 8)))
            return list(together), [await ask(client, number) for number in range(8)]

    together, alone = asyncio.run(run())
    assert together == alone
    assert crowd.stack.replicas()[0].num_preemptions > 0


def test_f38_answers_from_cached_blocks_are_those_without(crowd: Asker) -> None:
    """Lengths around whole blocks, beginnings in common, a token changed in the first block; the third time a salt of
    its own keeps each from the cache."""
    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    base = [100 + number % 50 for number in range(5 * BLOCK_SIZE)]
    prompts = [base[: blocks * BLOCK_SIZE + more] for blocks in (1, 2, 3) for more in (-1, 0, 1)]
    prompts += [[99, *base[1 : 3 * BLOCK_SIZE]], [*base[BLOCK_SIZE : 2 * BLOCK_SIZE] * 2, 7]]
    with Client(crowd.stack.grpc) as client:

        def ask(prompt: list[int], salt: str) -> tuple[str, int]:
            answer = client.generate(prompt, **options, cache_salt=salt)
            return answer.text, answer.usage.cached_tokens

        cold = [ask(prompt, f"f38 {number}") for number, prompt in enumerate(prompts)]
        for _ in range(2):
            warm = [ask(prompt, "f38") for prompt in prompts]
            assert [text for text, _ in warm] == [text for text, _ in cold]
    assert not any(num_cached for _, num_cached in cold)
    # A whole hit still computes a token, and its block.
    for prompt, (_, num_cached) in zip(prompts, warm, strict=True):
        assert num_cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_f40_clients_that_leave_leave_nothing_behind(crowd: Asker) -> None:
    rng = random.Random(40)
    prefix = "A shared beginning of some length, "

    async def leave(client: AsyncClient, number: int) -> None:
        stream = await client.generate(f"{prefix}{number % 7}", max_tokens=60, ignore_eos=True, stream=True)
        num_wanted = rng.choice([0, 1, 1, 2, 8, 59])
        if num_wanted:
            async for _ in stream:
                num_wanted -= 1
                if num_wanted <= 0:
                    break
        stream.cancel()

    async def run() -> None:
        async with AsyncClient(crowd.stack.grpc) as client:
            wanted = await ids_of(client, f"{prefix}3", max_tokens=8, ignore_eos=True, temperature=0)
            for _ in range(4):
                await asyncio.gather(*(leave(client, number) for number in range(24)))
                assert await ids_of(client, f"{prefix}3", max_tokens=8, ignore_eos=True, temperature=0) == wanted

    asyncio.run(run())
    eventually(lambda: crowd.stack.replicas()[0].num_used_blocks == 0, 10, "all blocks are free")


def test_f34_a_prompt_that_fills_the_pool_and_small_ones_both_get_through(crowd: Asker) -> None:
    async def run() -> None:
        async with AsyncClient(crowd.stack.grpc) as client:
            steady = [ids_of(client, f"steady {i}", max_tokens=120, ignore_eos=True) for i in range(4)]
            big = ids_of(client, "x" * 450, max_tokens=4, ignore_eos=True)
            small = [ids_of(client, f"small {i}", max_tokens=4, ignore_eos=True) for i in range(20)]
            found = await asyncio.wait_for(asyncio.gather(big, *steady, *small), 60)
            assert [len(ids[0]) for ids in found] == [4, *[120] * 4, *[4] * 20]

    asyncio.run(run())


def test_f34_short_prompts_get_through_long_ones_that_keep_coming(crowd: Asker) -> None:
    """Two prompts of eight steps are being computed all the time; few of them end before a short one has its token."""
    num_long_ended = 0

    async def run() -> list[int]:
        async with AsyncClient(crowd.stack.grpc) as client:
            waited: list[int] = []
            long_started, is_over = asyncio.Event(), False

            async def keep_coming(number: int) -> None:
                nonlocal num_long_ended
                while not is_over:
                    # The pool has blocks for both, and for a short one beside them.
                    stream = await client.generate(
                        "x" * 250, max_tokens=1, cache_salt=f"{number} {num_long_ended}", stream=True
                    )
                    long_started.set()
                    async for _ in stream:
                        pass
                    num_long_ended += 1

            long = [asyncio.ensure_future(keep_coming(number)) for number in range(2)]
            await long_started.wait()
            for number in range(20):
                before = num_long_ended
                await client.generate(f"short {number}", max_tokens=1, ignore_eos=True)
                waited.append(num_long_ended - before)
            is_over = True
            await asyncio.gather(*long)
            return waited

    waited = asyncio.run(asyncio.wait_for(run(), 120))
    assert max(waited) <= MOST_LONG_BEFORE_A_SHORT, waited


def test_f34_a_long_prompt_gets_through_answers_that_never_stop(crowd: Asker) -> None:
    """Eight sequences decode at any time until the prompt of fourteen chunks has its token."""
    is_over = asyncio.Event()

    async def run() -> None:
        async with AsyncClient(crowd.stack.grpc) as client:

            async def keep_answering(number: int) -> None:
                while not is_over.is_set():
                    await ids_of(client, f"{number}", max_tokens=40, ignore_eos=True)

            steady = [asyncio.ensure_future(keep_answering(number)) for number in range(8)]
            running = "the pool is busy"
            await asyncio.to_thread(eventually, lambda: crowd.stack.replicas()[0].num_running >= 6, 60, running)
            try:
                (ids,) = await ids_of(client, "y" * 14 * CHUNK_TOKENS, max_tokens=1, ignore_eos=True)
                assert len(ids) == 1
            finally:
                is_over.set()
                await asyncio.gather(*steady)

    asyncio.run(asyncio.wait_for(run(), 120))
