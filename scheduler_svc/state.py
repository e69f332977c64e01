"""The core's state as plain data, and a core in that state again: where a recording begins that has lost its beginning.

Knows the core's classes, all of them by name, and what in them is nobody's business: prompts are left out, and names of
tenants, groups and blocks are replaced when the state is written. Reads data alone: what is not named here is refused.

`capture` only copies, so that it may be done between two inputs of a busy core; `write` is for when somebody asks.
"""

from __future__ import annotations

import enum
import gc
import json
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from scheduler_svc.core.admission import Admissions
from scheduler_svc.core.advice import Advisor
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.counters import ReplicaCounters
from scheduler_svc.core.deadlines import Deadlines
from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.foresight import Foresight
from scheduler_svc.core.group_places import GroupPlaces, Places
from scheduler_svc.core.growth import Growth
from scheduler_svc.core.history import History
from scheduler_svc.core.host_tier import HostTier
from scheduler_svc.core.in_flight import InFlight
from scheduler_svc.core.intake import Longest
from scheduler_svc.core.kv_space import KvSpace
from scheduler_svc.core.ledger import Ledger
from scheduler_svc.core.lengths import Lengths
from scheduler_svc.core.limits import CoreLimits, PreemptionMode, SchedulingPolicy
from scheduler_svc.core.order import Order
from scheduler_svc.core.pace import Pace
from scheduler_svc.core.placement import Placement, Promise
from scheduler_svc.core.plan import Limit
from scheduler_svc.core.prefix_cache import PrefixCache, PrefixChain
from scheduler_svc.core.queue import FairQueue, WaitingQueue
from scheduler_svc.core.rates import MeanStep, StepRates
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.room import WaitingRoom
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.steady import SteadyRows
from scheduler_svc.core.step import UnansweredPlan
from scheduler_svc.core.types import ReplicaSpec, Request

_CLASSES: dict[str, type[Any]] = {
    each.__name__: each
    for each in (
        *(Scheduler, Order, Ledger, Fleet, Longest, Admissions, Placement, Promise, Deadlines),
        *(WaitingRoom, WaitingQueue, FairQueue, GroupPlaces, Places, Pace),
        *(
            Replica,
            ReplicaSpec,
            ReplicaCounters,
            StepRates,
            MeanStep,
            Growth,
            Lengths,
            Foresight,
            Rows,
            SteadyRows,
            InFlight,
        ),
        *(UnansweredPlan, KvSpace, BlockPool, PrefixCache, HostTier, Sequence, PrefixChain),
    )
}
_ENUMS: dict[str, type[enum.Enum]] = {each.__name__: each for each in (State, Limit, PreemptionMode, SchedulingPolicy)}
_CONTAINERS: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (list, tuple, set, deque, dict, OrderedDict, Counter)
}
_ATOMS = frozenset((int, float, str, bool, bytes, type(None)))
_WITH_NAMES = frozenset((FairQueue, WaitingRoom, GroupPlaces))
"""Classes in whose own containers strings are names of tenants or groups, models apart."""
_WITH_MODELS = frozenset(("queues", "paces"))
_NODE_BYTES, _ITEM_BYTES = 150, 12
"""About what a node and an item take."""


@dataclass(frozen=True, slots=True)
class _Ref:
    """Another node."""

    index: int


@dataclass(slots=True)
class _Node:
    kind: str
    """A class or container by name, or one of what `_capture_other` makes."""
    items: Any
    """Atoms and references; of mappings keys and values in turn."""
    has_names: bool = False


@dataclass(slots=True)
class CoreState:
    """A core's state. Holds what must not be told; `write` does not tell it."""

    nodes: list[_Node] = field(default_factory=list)
    fields: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of what the items of a class's nodes are."""
    requests: list[Request] = field(default_factory=list)
    """Of the live sequences."""
    num_bytes: int = 0
    """About what it takes in memory."""


def capture(core: Scheduler) -> CoreState:
    """The state at this moment, in which nothing changes any more."""
    capturing = _Capture()
    was_collecting = gc.isenabled()
    gc.disable()  # nothing here is garbage, and looking for some would take as long again
    try:
        capturing.value(core, False)
    finally:
        if was_collecting:
            gc.enable()
    return capturing.state


class _Capture:
    def __init__(self) -> None:
        self.state = CoreState()
        self._known: dict[int, tuple[_Ref, object]] = {}  # with the object, so that its id is not used again
        self._getters: dict[type[Any], tuple[type[Any], attrgetter[Any]]] = {}  # type -> its class, its fields

    def value(self, value: Any, has_names: bool) -> Any:
        """The value itself if it is an atom, else a reference to its node."""
        if type(value) in _ATOMS:
            return value
        known = self._known.get(id(value))
        if known is not None:
            return known[0]
        node, ref = _Node("", ()), _Ref(len(self.state.nodes))
        self.state.nodes.append(node)
        self._known[id(value)] = (ref, value)
        if type(value) in self._getters:
            self._capture_object(node, value)
        elif type(value).__name__ in _CONTAINERS:
            self._capture_container(node, value, has_names)
        else:
            self._capture_other(node, value)
        self.state.num_bytes += _NODE_BYTES + _ITEM_BYTES * (len(node.items) if node.items else 0)
        return ref

    def _capture_container(self, node: _Node, value: Any, has_names: bool) -> None:
        node.kind, node.has_names = type(value).__name__, has_names
        items = list(chain.from_iterable(value.items()) if isinstance(value, dict) else value)
        is_flat = _ATOMS.issuperset(map(type, items))
        node.items = items if is_flat else [self.value(item, has_names) for item in items]

    def _capture_other(self, node: _Node, value: Any) -> None:
        match value:
            case enum.Enum():
                node.kind, node.items = "enum", [type(value).__name__, value.value]
            case array():  # of tokens, which are not told
                node.kind, node.items = "tokens", [len(value)]
            case Request():
                node.kind, node.items = "request", [value.sequence_id]
                self.state.requests.append(value)
            case CoreLimits() | History() | Advisor() | MappingProxyType():
                # Known from the recording's header, or nothing is decided by it.
                node.kind = type(value).__name__
            case _:
                self._capture_object(node, value)

    def _capture_object(self, node: _Node, value: Any) -> None:
        kind, getter = self._getters.get(type(value)) or self._add_class(value)
        node.kind, values = kind.__name__, getter(value)
        if kind in _WITH_NAMES:
            own = zip(self.state.fields[kind.__name__], values, strict=True)
            node.items = [self.value(each, name not in _WITH_MODELS) for name, each in own]
        else:
            node.items = [each if type(each) in _ATOMS else self.value(each, False) for each in values]

    def _add_class(self, value: Any) -> tuple[type[Any], attrgetter[Any]]:
        kind = next((each for each in type(value).__mro__ if _CLASSES.get(each.__name__) is each), None)
        if kind is None:
            raise TypeError(f"{type(value).__name__} is no part of the core's state that this module knows")
        names = self.state.fields[kind.__name__] = _field_names(kind, value)
        if len(names) < 2:
            raise TypeError(f"{kind.__name__} has {len(names)} fields; attrgetter gives a tuple of two and more alone")
        found = self._getters[type(value)] = (kind, attrgetter(*names))
        return found


def _field_names(kind: type[Any], value: Any) -> tuple[str, ...]:
    slots = getattr(kind, "__slots__", None)
    return tuple(slots) if slots is not None else tuple(sorted(value.__dict__))


def write(state: CoreState, name_of: Callable[[str], str], block_name_of: Callable[[bytes], bytes]) -> str:
    """The state as JSON; `name_of` and `block_name_of` replace what names somebody or something."""

    def atom(value: Any, has_names: bool) -> Any:
        if isinstance(value, _Ref):
            return [value.index]
        if isinstance(value, bytes):
            return {"block": block_name_of(value).hex()}
        return name_of(value) if has_names and isinstance(value, str) else value

    nodes = [[node.kind, [atom(item, node.has_names) for item in node.items]] for node in state.nodes]
    return json.dumps({"fields": state.fields, "nodes": nodes}, separators=(",", ":"))


def read(text: str, limits: CoreLimits, requests: Mapping[int, Request]) -> Scheduler:
    """A core in the state that `text` tells, with these limits, and requests of its live sequences by their ids.

    Raises ValueError for what is no such state, or one of another version's core.
    """
    try:
        data = json.loads(text)
        reading = _Reading(data["nodes"], data["fields"], limits, requests)
        core = reading.node(0)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no state of this version's core: {type(error).__name__} {error}") from error
    if not isinstance(core, Scheduler):
        raise ValueError(f"a state begins with the scheduler, not with {type(core).__name__}")
    for sequence in core.sequences.values():
        _name_blocks(sequence)
    return core


class _Reading:
    def __init__(
        self, nodes: list[Any], fields: Mapping[str, list[str]], limits: CoreLimits, requests: Mapping[int, Request]
    ) -> None:
        self._nodes, self._fields, self._limits, self._requests = nodes, fields, limits, requests
        self._made: dict[int, Any] = {}

    def node(self, index: int) -> Any:
        """What the node stands for, one and the same whenever it is asked for."""
        if index not in self._made:
            kind, items = self._nodes[index]
            if kind in _CLASSES:
                self._make_object(index, kind, items)
            elif kind in _CONTAINERS:
                self._make_container(index, kind, items)
            else:
                self._made[index] = self._make_other(kind, items)
        return self._made[index]

    def _value(self, item: Any) -> Any:
        if isinstance(item, list):
            return self.node(item[0])
        return bytes.fromhex(item["block"]) if isinstance(item, dict) else item

    def _make_object(self, index: int, kind: str, items: list[Any]) -> None:
        made = self._made[index] = object.__new__(_CLASSES[kind])
        if tuple(self._fields[kind]) != (getattr(_CLASSES[kind], "__slots__", None) or tuple(self._fields[kind])):
            raise KeyError(f"{kind} has other fields: {', '.join(self._fields[kind])}")
        for name, item in zip(self._fields[kind], items, strict=True):
            object.__setattr__(made, name, self._value(item))

    def _make_container(self, index: int, kind: str, items: list[Any]) -> None:
        if kind == "tuple":  # which is in no circle, for it cannot be made before what is in it
            self._made[index] = tuple(map(self._value, items))
            return
        made = self._made[index] = _CONTAINERS[kind]()
        if isinstance(made, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                made[self._value(key)] = self._value(value)
        elif isinstance(made, set):
            made.update(map(self._value, items))
        else:
            made.extend(map(self._value, items))

    def _make_other(self, kind: str, items: list[Any]) -> Any:
        match kind:
            case "enum":
                return _ENUMS[items[0]](items[1])
            case "tokens":
                return array("I", bytes(4 * items[0]))
            case "request":
                return self._requests[items[0]]
            case "CoreLimits":
                return self._limits
            case "mappingproxy":
                return self._limits.tenant_weights
            case "History":
                return History(self._limits.max_explained)
            case "Advisor":
                return Advisor()
        raise KeyError(f"kind {kind!r}")


def _name_blocks(sequence: Sequence) -> None:
    """Lets the chains of a sequence go on with the names that its request brings."""
    digests, names = sequence.chain, sequence.request.block_names or {}
    while digests is not None:
        digests.known = names.get((digests.fingerprint, digests.block_size), ())
        digests = digests.other
