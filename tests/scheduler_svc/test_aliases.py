"""Aliases that operators set: checked by name and weight, told to routers, and brought back by them after a restart."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from octavo.internal.v1 import scheduler_pb2 as pb
from scheduler_svc.aliases import MAX_ALIASES, AliasBook, BadAlias
from tests.scheduler_svc.harness import ENDPOINT, Shell, attaching, run, scheduler, watching

CONVERSATION, USER = pb.STICKINESS_CONVERSATION, pb.STICKINESS_USER


def alias(name: str, weights: dict[str, float], sticky: pb.Stickiness = USER) -> pb.Alias:
    return pb.Alias(name=name, weights=weights, sticky=sticky)


def test_a_later_table_holds() -> None:
    times = iter([100, 90, 90])
    book, models = AliasBook(lambda: next(times)), {"big", "new"}
    book.set(alias("chat", {"big": 95, "new": 5}), models)
    book.set(alias("b", {"big": 1, "new": 0}), models)
    assert [(each.name, dict(each.weights)) for each in book.table.aliases] == [
        ("b", {"big": 1.0}),
        ("chat", {"big": 95.0, "new": 5.0}),
    ]
    assert book.table.changed_at_ns == 101, "it rises though the clock does not"
    other = AliasBook(lambda: 0)
    assert other.adopt(book.table)
    assert not other.adopt(pb.AliasTable(changed_at_ns=50, aliases=[alias("old", {"big": 1})]))
    assert other.table == book.table
    assert book.remove("chat")
    assert not book.remove("chat")
    assert other.adopt(book.table)
    assert [each.name for each in other.table.aliases] == ["b"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (alias("", {"big": 1}), "alias.name ''"),
        (alias("a b", {"big": 1}), "no blanks"),
        (alias("x" * 129, {"big": 1}), "1 to 128"),
        (alias("big", {"big": 1}), "is the name of a model"),
        (alias("a", {}), "above 0; models are big, new"),
        (alias("a", {"big": 0}), "above 0"),
        (alias("a", {"other": 1}), "'other' is not served; models are big, new"),
        (alias("a", {"big": -1}), "at least 0, got -1"),
        (alias("a", {"big": float("nan")}), "at least 0, got nan"),
        (alias("a", {"big": float("inf")}), "at least 0, got inf"),
        (alias("a", {"big": 1}, 7), "alias.sticky 7"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_alias_changes_nothing(bad: pb.Alias, said: str) -> None:
    book = AliasBook()
    with pytest.raises(BadAlias) as refused:
        book.set(bad, {"big", "new"})
    assert said in str(refused.value)
    assert book.table == pb.AliasTable()


def test_there_is_a_most() -> None:
    book = AliasBook()
    book.adopt(pb.AliasTable(changed_at_ns=1, aliases=[pb.Alias(name=str(n)) for n in range(MAX_ALIASES)]))
    with pytest.raises(BadAlias, match="remove one first"):
        book.set(alias("more", {"m": 1}), {"m"})
    book.set(alias("0", {"m": 1}), {"m"})


def test_every_router_is_told() -> None:
    async def test(shell: Shell) -> pb.AliasTable:
        await attaching(shell)
        routers = [await watching(shell), await watching(shell)]
        response = await shell.control.SetAlias(pb.SetAliasRequest(alias=alias("chat", {"m": 3})))
        assert response.num_routers == 2
        for router in routers:
            told = (await router.watch.read()).aliases
            assert [(each.name, dict(each.weights), each.sticky) for each in told.aliases] == [
                ("chat", {"m": 3.0}, USER)
            ]
        (listed,) = (await shell.control.ListAliases(pb.ListAliasesRequest())).aliases
        assert listed.name == "chat"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await shell.control.SetAlias(pb.SetAliasRequest(alias=alias("m", {"m": 3})))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await shell.control.RemoveAlias(pb.RemoveAliasRequest(name="other"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert "there are chat" in (refused.value.details() or "")
        return told

    async def test_restarted(shell: Shell, told: pb.AliasTable) -> None:
        bystander = await watching(shell)
        watch = shell.stub.Watch(pb.WatchRequest(token_endpoint=ENDPOINT, name="router", aliases=told))
        assert (await watch.read()).aliases == told
        assert (await bystander.watch.read()).aliases == told
        await shell.control.RemoveAlias(pb.RemoveAliasRequest(name="chat"))
        assert (await bystander.watch.read()).aliases.aliases == []

    async def both() -> None:
        async with scheduler() as shell:
            told = await test(shell)
        async with scheduler() as shell:
            await test_restarted(shell, told)

    run(both)
