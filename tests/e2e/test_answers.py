"""A real model answers through three real processes, on every surface."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import openai
import pytest

from octavo import AsyncClient, Client
from tests.e2e.stack import Stack, children_of, eventually, listeners_of

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def chat_text(stack: Stack, **options: object) -> str:
    client = openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24, **options)
    return answer.choices[0].message.content


def test_the_openai_package_gets_an_answer(stack: Stack) -> None:
    assert "Paris" in chat_text(stack)


def test_streamed_and_whole_answers_are_the_same_on_both_surfaces(stack: Stack) -> None:
    whole = chat_text(stack)
    client = openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    with Client(stack.grpc) as grpc_client:
        deltas = grpc_client.chat(QUESTION, temperature=0, max_tokens=24, stream=True)
        over_grpc = "".join(delta.text for delta in deltas)
        unary = grpc_client.chat(QUESTION, temperature=0, max_tokens=24)
    assert whole == streamed == over_grpc == unary.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == unary.usage.completion_tokens
    receipt = unary.choices[0].receipt
    assert receipt.batch_invariant
    assert receipt.numerics
    assert receipt.attempts == 1


def test_a_seeded_answer_repeats_and_choices_differ(stack: Stack) -> None:
    with Client(stack.grpc) as client:
        first = client.generate("Once upon a time", max_tokens=24, temperature=1.0, seed=7, n=3)
        again = client.generate("Once upon a time", max_tokens=24, temperature=1.0, seed=7, n=3)
        alone = client.generate("Once upon a time", max_tokens=24, temperature=1.0, seed=7)
    assert [choice.token_ids for choice in first.choices] == [choice.token_ids for choice in again.choices]
    assert len({tuple(choice.token_ids) for choice in first.choices}) == 3
    assert alone.choices[0].token_ids == first.choices[0].token_ids


def test_f36_64_clients_on_a_small_pool_get_the_text_they_get_alone(stack: Stack) -> None:
    prompts = [f"Story number {i}: {'once upon a time ' * (i % 7)}there was a" for i in range(64)]

    async def ask(client: AsyncClient, i: int) -> tuple[list[int], str]:
        priority = 1 if i < 32 else 0
        answer = await client.generate(
            prompts[i], max_tokens=32, ignore_eos=True, temperature=i % 2, seed=i, priority=priority
        )
        return list(answer.choices[0].token_ids), answer.text

    async def together() -> list[tuple[list[int], str]]:
        async with AsyncClient(stack.grpc) as client:
            first = [asyncio.ensure_future(ask(client, i)) for i in range(32)]
            # Room is kept for the growth of those that run, so that better work alone displaces them.
            running = "some run whom better ones can displace"
            await asyncio.to_thread(eventually, lambda: stack.replicas()[0].num_running >= 8, 60, running)
            return await asyncio.gather(*first, *(ask(client, i) for i in range(32, 64)))

    async def alone(indices: range) -> list[tuple[list[int], str]]:
        async with AsyncClient(stack.grpc) as client:
            return [await ask(client, i) for i in indices]

    crowd = asyncio.run(together())
    (replica,) = stack.replicas()
    assert replica.num_preemptions > 0, "the pool was meant to be too small"
    assert "preempted request" in stack.log
    sample = range(0, 64, 9)
    assert asyncio.run(alone(sample)) == [crowd[i] for i in sample]
    assert all(len(ids) == 32 for ids, _ in crowd)
    eventually(lambda: stack.replicas()[0].num_used_blocks == 0, 5, "all blocks are free")


@pytest.mark.parametrize("surface", ["grpc", "http"])
def test_a_client_that_goes_away_frees_its_blocks_within_a_second(stack: Stack, surface: str) -> None:
    program = {
        "grpc": f"""
from octavo import Client
for delta in Client({stack.grpc!r}).generate("Count:", max_tokens=900, ignore_eos=True, stream=True):
    print("token", flush=True)
""",
        "http": f"""
import json, urllib.request
body = {{"prompt": "Count:", "max_tokens": 900, "ignore_eos": True, "stream": True}}
request = urllib.request.Request({stack.http!r} + "/v1/completions", json.dumps(body).encode())
request.add_header("Content-Type", "application/json")
for line in urllib.request.urlopen(request):
    print("token", flush=True)
""",
    }[surface]
    client = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "token\n"
    assert stack.replicas()[0].num_used_blocks > 0
    client.kill()
    client.wait()
    eventually(lambda: stack.replicas()[0].num_used_blocks == 0, 1.0, "the dead client's blocks are free")


def test_octavo_chat_holds_a_conversation(stack: Stack) -> None:
    command = [sys.executable, "-m", "octavo", "chat", "--server", stack.grpc, "--temperature", "0"]
    turns = "My name is Ada.\nWhat is my name?\n"
    done = subprocess.run(command, input=turns, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Ada" in done.stdout.split("?")[-1] + done.stdout


def test_octavo_generate_answers_once(stack: Stack) -> None:
    command = [sys.executable, "-m", "octavo", "generate", "--server", stack.grpc, "--temperature", "0"]
    command.append("The capital of France is")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_f68_everything_listens_on_loopback(stack: Stack) -> None:
    found = [pair for pid in children_of(stack.process.pid) for pair in listeners_of(pid)]
    assert found
    assert {address for address, _ in found} <= LOOPBACK


def test_f72_prompts_and_answers_are_not_in_the_log(stack: Stack) -> None:
    canary = "xylophone-canary-4711"
    with Client(stack.grpc) as client:
        client.generate(f"Repeat: {canary}", max_tokens=8)
        with pytest.raises(Exception, match="max_tokens"):
            client.generate(f"Repeat: {canary}", max_tokens=100_000)
    assert canary not in stack.log
