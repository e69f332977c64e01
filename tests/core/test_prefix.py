"""What the prefix cache finds, and what it must not."""

from __future__ import annotations

from array import array

import pytest

from scheduler_svc.core.prefix_cache import PrefixCache, PrefixChain
from scheduler_svc.core.types import CoreLimits, FinishReason, Scheduled
from tests.core.house import House, Stream, spec


def cached(stream: Stream) -> int:
    """Tokens found when it first started."""
    return next(event.cached_tokens for event in stream.events if isinstance(event, Scheduled))


def run_one(house: House, prompt: list[int], **fields: object) -> Stream:
    stream = house.submit(prompt, max_tokens=1, **fields)
    house.drain()
    house.check_outcomes()
    return stream


@pytest.fixture
def house() -> House:
    house = House()
    house.attach(spec(block_size=4))
    return house


@pytest.mark.parametrize(("length", "expected"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 8)])
def test_reuse_is_in_whole_blocks_and_leaves_a_token_to_compute(house: House, length: int, expected: int) -> None:
    run_one(house, list(range(10)))  # two full blocks and two tokens
    assert cached(run_one(house, list(range(length)))) == expected


def test_f38_an_exact_full_hit_computes_its_last_block(house: House) -> None:
    run_one(house, list(range(8)))
    again = run_one(house, list(range(8)))
    assert cached(again) == 4


def test_f38_a_block_counts_only_behind_the_same_beginning(house: House) -> None:
    run_one(house, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cached(run_one(house, [5, 6, 7, 8, 5, 6, 7, 8, 9])) == 0  # same second block, other parent
    assert cached(run_one(house, [0, 2, 3, 4, 5, 6, 7, 8, 9])) == 0  # one token of block 0 differs
    assert cached(run_one(house, [1, 2, 3, 4, 5, 6, 7, 0, 9])) == 4


@pytest.mark.parametrize(
    "other", [{"tenant": "t"}, {"cache_salt": "s"}, {"adapter": "a"}], ids=["tenant", "salt", "adapter"]
)
def test_tenant_salt_and_adapter_keep_apart(house: House, other: dict[str, str]) -> None:
    run_one(house, list(range(9)))
    assert cached(run_one(house, list(range(9)), **other)) == 0
    assert cached(run_one(house, list(range(9)), **other)) == 8


def test_f70_another_tenant_learns_nothing_of_a_cached_prompt_whatever_its_salt() -> None:
    house = House()
    house.attach(spec(block_size=4, num_device_blocks=400))
    secret, wrong = list(range(40)), list(range(100, 140))
    for salt in ("", "s"):
        run_one(house, secret, tenant="a", cache_salt=salt)
        for guess in (secret, wrong):
            for own_salt in ("", "s", "a", "other"):
                right = run_one(house, guess, tenant=f"b{own_salt}{guess[0]}{salt}", cache_salt=own_salt)
                assert cached(right) == 0
        assert cached(run_one(house, secret, tenant="a", cache_salt=salt)) == 36


@pytest.mark.parametrize("is_running", [False, True], ids=["cached", "being computed"])
def test_f70_a_right_guess_takes_the_steps_of_a_wrong_one(is_running: bool) -> None:
    """Neither what another tenant has computed nor what it is computing makes a prompt quicker, or lets it wait."""
    secret, wrong = list(range(40)), list(range(60, 100))
    seen = set()
    for guess in (secret, wrong):
        for salt in ("", "a's"):
            house = House()
            house.attach(spec(block_size=4, num_device_blocks=400, max_step_tokens=16, num_slots=8))
            owner = house.submit(secret, max_tokens=3, tenant="a", cache_salt="a's")
            for _ in range(1 if is_running else 10):
                house.step()
            assert owner.is_live == is_running
            probe = house.submit(guess, max_tokens=1, tenant="b", cache_salt=salt)
            num_steps = 0
            while not probe.received:
                house.step()
                num_steps += 1
            seen.add((num_steps, cached(probe), house.scheduler.statistics().replicas[0].num_computed_tokens))
            house.drain()
            house.check_outcomes()
    assert len(seen) == 1
    assert {num_cached for _, num_cached, _ in seen} == {0}


def test_tenants_share_by_the_operators_setting_alone_and_a_salt_still_narrows() -> None:
    house = House(CoreLimits(tenants_share_prefixes=True))
    house.attach(spec(block_size=4))
    run_one(house, list(range(9)), tenant="one")
    assert cached(run_one(house, list(range(9)), tenant="two")) == 8
    assert cached(run_one(house, list(range(9)), tenant="two", cache_salt="s")) == 0
    assert cached(run_one(house, list(range(9)), tenant="one", cache_salt="s")) == 8


def test_names_cannot_be_shifted_into_one_another() -> None:
    assert PrefixChain("f", 4, ("ab", "c", "")).root != PrefixChain("f", 4, ("a", "bc", "")).root
    assert PrefixChain("f", 4, ("", "", "x")).root != PrefixChain("g", 4, ("", "", "x")).root


def test_hashes_are_the_same_in_every_process() -> None:
    chain = PrefixChain("fingerprint", 4, ("adapter", "tenant", "salt"))
    assert chain.digest(array("I", range(8)), 1).hex() == KNOWN_DIGEST


KNOWN_DIGEST = "8c35ef658820809301c07b8274c8a5de75aa6dce810efd0828ad07b164dd3474"


def test_a_block_is_findable_when_its_step_is_answered_not_when_it_is_planned(house: House) -> None:
    house.submit(range(9), max_tokens=5)
    house.make_plan()
    early = house.submit(range(9), max_tokens=1)
    house.make_plan()
    assert not early.is_running  # it waits for the blocks rather than computing them too
    house.run()
    house.complete()
    late = house.submit(range(9), max_tokens=1)
    house.make_plan()
    assert (cached(early), cached(late)) == (8, 8)
    house.drain()
    house.check_outcomes()


def test_a_cancelled_sequence_leaves_only_what_was_answered(house: House) -> None:
    first = house.submit(range(20), max_tokens=5)
    house.step()  # 16 tokens
    house.make_plan()  # the rest, unanswered
    house.cancel(first)
    follower = house.submit(range(21), max_tokens=1)
    house.make_plan()
    assert cached(follower) == 16
    house.drain()
    house.check_outcomes()


def test_output_tokens_are_reused_too(house: House) -> None:
    first = house.submit([1, 2, 3], max_tokens=10)
    house.drain()
    turn = run_one(house, [1, 2, 3, *first.received, 40, 41])
    assert cached(turn) == 12


def test_a_row_with_a_numeric_error_leaves_nothing_behind(house: House) -> None:
    replica = house.replicas[1]
    stream = house.submit(range(30), max_tokens=4)  # two chunks; the blocks of the first were findable already
    replica.numeric_errors.add(stream.request.stream_key)
    house.drain()
    assert stream.finish is FinishReason.NUMERIC_ERROR
    assert house.scheduler.statistics().replicas[0].num_cached_blocks == 0
    assert cached(run_one(house, list(range(30)))) == 0


def test_a_numeric_error_spares_what_others_computed(house: House) -> None:
    run_one(house, list(range(9)))
    stream = house.submit(range(20), max_tokens=4)
    house.replicas[1].numeric_errors.add(stream.request.stream_key)
    house.drain()
    assert cached(run_one(house, list(range(9)))) == 8


@pytest.mark.parametrize(("start", "expected"), [(None, 16), (0, 0), (4, 0), (5, 4), (8, 4), (9, 8), (17, 16)])
def test_prompt_logprobs_bound_the_hit(house: House, start: int | None, expected: int) -> None:
    run_one(house, list(range(18)))
    assert cached(run_one(house, list(range(18)), prompt_logprobs_start=start)) == expected


def test_the_longest_unused_goes_first_and_a_prefix_from_its_end(house: House) -> None:
    run_one(house, list(range(24)))  # 6 blocks
    run_one(house, list(range(100, 124)))  # 6 more of 16; the sampled token needs none
    run_one(house, list(range(200, 228)))  # 7: takes the 4 fresh ones, then the first prompt's last three
    assert cached(run_one(house, list(range(23)))) == 12
    assert cached(run_one(house, list(range(100, 123)))) == 12  # gave three to the first prompt


def test_reset_forgets_what_nobody_holds(house: House) -> None:
    run_one(house, list(range(9)))
    house.submit(range(50, 59), max_tokens=30)
    house.step()
    house.step()
    assert house.scheduler.reset_prefix_cache() == 2
    assert house.scheduler.reset_prefix_cache() == 0
    follower = house.submit(range(50, 59), max_tokens=1)
    house.step()
    assert cached(follower) == 8  # held, so still there
    house.drain()
    assert cached(run_one(house, list(range(9)))) == 0


def test_caching_can_be_off() -> None:
    house = House(CoreLimits(enable_prefix_caching=False))
    house.attach(spec())
    run_one(house, list(range(9)))
    assert cached(run_one(house, list(range(9)))) == 0


def test_the_cache_takes_one_block_for_a_digest_and_one_digest_for_a_block() -> None:
    cache = PrefixCache()
    cache.add(b"x", 1)
    cache.add(b"x", 2)
    assert (cache.find(b"x"), cache.digest_of(2)) == (1, None)
    with pytest.raises(ValueError, match="block 1"):
        cache.add(b"y", 1)
    cache.forget(1)
    assert cache.find(b"x") is None


def test_f38_fifty_prompts_twice_are_answered_as_without_a_cache() -> None:
    """Of lengths around whole blocks, many with a beginning in common; a wrong block would change what is sampled."""
    prompts = [
        [*range(4 * (number % 3)), 20 + number % 25, *([number // 25] * (4 * (number % 5 + 1) - 2 + number % 3))]
        for number in range(50)
    ]
    assert len({tuple(prompt) for prompt in prompts}) == 50
    answers: list[list[list[int]]] = []
    for is_on in (False, True):
        house = House(CoreLimits(enable_prefix_caching=is_on))
        house.attach(spec(block_size=4, num_device_blocks=400))
        streams = [house.submit(prompt, max_tokens=6) for prompt in prompts * 2]
        house.drain()
        house.check_outcomes()
        answers.append([stream.received for stream in streams])
        assert any(cached(stream) for stream in streams[50:]) == is_on
    assert answers[0] == answers[1]
    assert answers[1][:50] == answers[1][50:]


def test_f38_a_block_is_found_by_all_of_a_strong_hash() -> None:
    tokens = array("I", range(8))
    chain = PrefixChain("f", 4, ("a", "t", "s"))
    digest = chain.digest(tokens, 1)
    others = [
        PrefixChain("g", 4, ("a", "t", "s")).digest(tokens, 1),
        PrefixChain("f", 4, ("a", "t", "other")).digest(tokens, 1),
        PrefixChain("f", 8, ("a", "t", "s")).digest(tokens, 0),
        chain.digest(tokens, 0),
        *(
            PrefixChain("f", 4, ("a", "t", "s")).digest(array("I", [*range(at), 99, *range(at + 1, 8)]), 1)
            for at in range(8)
        ),
    ]
    assert len({digest, *others}) == 1 + len(others)
    assert {len(each) for each in (digest, *others)} == {32}
    cache = PrefixCache()
    cache.add(digest, 1)
    for place in range(len(digest)):
        nearly = bytes(byte ^ (at == place) for at, byte in enumerate(digest))
        assert cache.find(nearly) is None
    assert cache.find(digest) == 1
