"""Options: flags, help and validation are derived from one dataclass."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.option_parsing import add_options, number
from octavo.options import (
    Limits,
    OptionError,
    argument,
    check_values,
    differences,
    flags_of,
    from_args,
    given_options,
    option,
    to_arguments,
)
from octavo.sizes import format_bytes, parse_bytes
from router.config import RouterConfig
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig


@dataclass(frozen=True)
class Kitchen:
    recipe: str = argument("soup", "What to cook.")
    num_pots: int = option(2, "Pots, 100 % of them.", limits=Limits(1, 8))
    heat: float = option(0.5, "Share of the flame.", limits=Limits(0, 1))
    salted: bool = option(True, "Add salt.")
    pantry: int | None = option(None, "Room for food.", kind="bytes", limits=Limits(minimum=1024))
    stir: float = option(3.0, "Time between stirs.", kind="seconds")
    stove: str = option("gas", "Kind of stove.", choices=("gas", "wood"))

    def __post_init__(self) -> None:
        check_values(self)


def parse(config_class: type, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser, config_class)
    return parser.parse_args(words)


def test_every_kind_of_option_is_parsed() -> None:
    line = "stew --num-pots 3 --heat 0.25 --no-salted --pantry 2MiB --stir 1.5 --stove wood"
    words = line.split()
    cooked = from_args(Kitchen, parse(Kitchen, words))
    assert cooked == Kitchen("stew", 3, 0.25, False, 2 * 2**20, 1.5, "wood")


def test_what_was_not_given_keeps_its_default_and_is_not_counted_as_given() -> None:
    namespace = parse(Kitchen, ["--num-pots", "2"])
    assert given_options(Kitchen, namespace) == {"num_pots": 2}
    assert from_args(Kitchen, namespace) == Kitchen()


def test_an_override_wins_over_the_command_line() -> None:
    assert from_args(Kitchen, parse(Kitchen, ["--num-pots", "3"]), num_pots=4).num_pots == 4


def test_differences_name_value_and_default() -> None:
    assert differences(Kitchen()) == []
    assert differences(Kitchen("stew", num_pots=3, salted=False, pantry=3 * 2**29, stir=10.0)) == [
        "RECIPE stew (default soup)",
        "--num-pots 3 (default 2)",
        "--salted off (default on)",
        "--pantry 1.50 GiB (default unset)",
        "--stir 10 s (default 3 s)",
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_pots": 0}, "--num-pots 0: must be between 1 and 8. Use 1 or the default, 2"),
        ({"num_pots": 9}, "--num-pots 9: must be between 1 and 8. Use 8 or the default, 2"),
        ({"heat": float("nan")}, "--heat nan: must be between 0 and 1. Use 1 or the default, 0.5"),
        ({"pantry": 10}, "--pantry 10 B: must be at least 1024. Use 1024 or leave it out"),
        ({"stove": "sun"}, "--stove sun: must be one of gas, wood. The default is gas"),
        ({"num_pots": None}, "--num-pots unset: needs a value. The default is 2"),
    ],
)
def test_a_refusal_names_option_value_limit_and_remedy(values: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as caught:
        dataclasses.replace(Kitchen(), **values)
    assert str(caught.value) == text


@pytest.mark.parametrize("words", [["--num-pots", "0"], ["--num-pots", "two"], ["--pantry", "2G"]])
def test_the_parser_refuses_with_status_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Kitchen, words)
    assert caught.value.code == 2
    assert f"argument {words[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4", "4: must be between -3 and 3"),
        ("9" * 400, "must be between -3 and 3"),
        ("9" * 5000, "is not a whole number"),
        ("1e3", "is not a whole number"),
        ("nan", "is not a whole number"),
    ],
)
def test_a_commands_own_numbers_have_limits_too(text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        number(int, Limits(-3, 3))(text)
    assert number(int, Limits(-3, 3))("-3") == -3


def test_a_range_may_leave_its_lower_bound_out() -> None:
    limits = Limits(above=0, maximum=1)
    assert [limits.hold(value) for value in (-1, 0, 1e-9, 1, 2)] == [False, False, True, True, False]
    assert str(limits) == "must be above 0 and at most 1"
    assert [str(Limits(minimum=1)), str(Limits(maximum=1))] == ["must be at least 1", "must be at most 1"]


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "9" * 400 + ".0"])
def test_a_number_is_finite(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number"):
        number(float)(text)
    with pytest.raises(SystemExit):
        parse(Kitchen, ["--stir", text])
    assert "is not a number" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(Kitchen, ["--pantry", "9" * 400 + "TiB"])


def test_help_shows_defaults_and_survives_a_percent_sign() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Kitchen)
    text = " ".join(parser.format_help().split())
    assert "Pots, 100 % of them. (default: 2)" in text
    assert "--salted, --no-salted" in text
    assert "--pantry SIZE Room for food." in text


def test_fields_can_be_left_out() -> None:
    parser = argparse.ArgumentParser()
    added = add_options(parser, Kitchen, without={"recipe", "stove"})
    assert "stove" not in added
    with pytest.raises(SystemExit):
        parser.parse_args(["--stove", "gas"])


def test_flags_include_the_negation_of_booleans_and_no_positional() -> None:
    flags = flags_of(Kitchen)
    assert flags["--no-salted"].name == flags["--salted"].name == "salted"
    assert "--recipe" not in flags


@given(
    st.builds(
        Kitchen,
        recipe=st.text(min_size=1).filter(lambda text: "\0" not in text),
        num_pots=st.integers(1, 8),
        heat=st.floats(0, 1),
        salted=st.booleans(),
        pantry=st.none() | st.integers(1024, 2**50),
        stir=st.floats(-1e9, 1e9),
        stove=st.sampled_from(["gas", "wood"]),
    )
)
def test_arguments_make_the_same_config_again(config: Kitchen) -> None:
    assert from_args(Kitchen, parse(Kitchen, to_arguments(config))) == config


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("1024", 1024), ("2GiB", 2**31), ("1.5 MiB", 3 * 2**19), ("500MB", 5 * 10**8), ("7b", 7)],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "2G", "-1", "1e9", "GiB", "2 giga"])
def test_sizes_that_read_two_ways_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_sizes_are_written_with_a_unit() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1024, 3 * 2**29)] == ["0 B", "1023 B", "1.00 KiB", "1.50 GiB"]


@pytest.mark.parametrize("config_class", [RouterConfig, SchedulerConfig, WorkerConfig])
def test_the_defaults_of_each_process_are_valid_and_documented(config_class: type) -> None:
    config = config_class()
    assert differences(config) == []
    for entry in flags_of(config_class).values():
        assert entry.info.help.endswith("."), entry.name


def test_a_worker_refuses_two_sizes_of_one_cache() -> None:
    with pytest.raises(OptionError, match=r"--num-kv-blocks 8: .*--kv-cache-memory.*Give one of the two"):
        WorkerConfig(num_kv_blocks=8, kv_cache_memory=2**30)


def test_a_worker_refuses_more_sequences_than_a_step_has_tokens() -> None:
    with pytest.raises(OptionError, match="--max-num-seqs 64: is more than --max-num-batched-tokens 32"):
        WorkerConfig(max_num_batched_tokens=32)


def test_a_worker_refuses_blocks_that_attention_cannot_divide() -> None:
    with pytest.raises(OptionError, match="--block-size 24: does not divide 256"):
        WorkerConfig(block_size=24)
    assert WorkerConfig(block_size=24, simulate=True).block_size == 24


@dataclass(frozen=True)
class Shelf:
    spices: tuple[str, ...] = option((), "Spices.", flag="--spice", kind="repeated")

    def __post_init__(self) -> None:
        check_values(self)


def test_an_option_may_be_given_several_times() -> None:
    shelf = from_args(Shelf, parse(Shelf, ["--spice", "a=1", "--spice=b"]))
    assert shelf == Shelf(("a=1", "b"))
    assert differences(shelf) == ["--spice a=1, b (default none)"]
    assert to_arguments(shelf) == ["--spice=a=1", "--spice=b"]
    assert from_args(Shelf, parse(Shelf, [])) == Shelf()
