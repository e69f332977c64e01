"""How the ranks of a replica meet: torch's store for addresses, then a process group for tensors.

The store and the group move bytes and tensors, no objects, so nothing is unpickled. Knows torch.distributed; must not
know what is computed.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from octavo.process import StartError
from worker_svc.config import WorkerConfig
from worker_svc.device.choice import choose_device
from worker_svc.parallel.group import Membership
from worker_svc.parallel.place import RankPlace
from worker_svc.parallel.sockets import is_loopback, listen
from worker_svc.parallel.torch_group import TorchGroup

_ADDRESS_KEY = "rank-0"
# A rank may load its weights while others wait in a collective.
_COLLECTIVE_TIMEOUT = timedelta(hours=1)
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Rendezvous:
    """The store at which a replica's ranks meet, seen from one of them."""

    def __init__(self, place: RankPlace, timeout_s: float, listener: socket.socket | None) -> None:
        """Opens or reaches the store. `listener` is where rank 0 keeps it, if it listens already.

        Raises StartError where no store can be had within the time.
        """
        self._place = place
        is_host = place.rank == 0 and not place.has_launchers_store
        if is_host and listener is None:
            listener = listen(place.master_address, place.master_port)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                place.master_address,
                place.master_port,
                place.num_ranks,
                is_master=is_host,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach() if is_host and listener is not None else None,
            )
        except (RuntimeError, OSError) as error:
            raise StartError(
                f"rank {place.rank} of {place.num_ranks} cannot meet the others at MASTER_ADDR:MASTER_PORT "
                f"{place.master_address}:{place.master_port} within {timeout_s:g} s: {_first_line(error)}; is rank 0 "
                "started there, and can it be reached from here?"
            ) from error
        self._store = dist.PrefixStore(f"octavo/{place.attempt}", store)  # type: ignore[attr-defined]

    def publish(self, port: int, secret: bytes) -> None:
        """Rank 0 says where it awaits the others."""
        self._store.set(_ADDRESS_KEY, json.dumps({"port": port, "secret": secret.hex()}))

    def find(self) -> tuple[tuple[str, int], bytes]:
        """Where rank 0 awaits this rank, and the secret. Raises StartError when it does not say in time."""
        try:
            said = json.loads(self._store.get(_ADDRESS_KEY))
        except RuntimeError as error:
            raise StartError(
                f"rank {self._place.rank}: the store at {self._place.master_address}:{self._place.master_port} knows "
                f"no rank 0 ({_first_line(error)}); is it started?"
            ) from error
        return (self._place.master_address, said["port"]), bytes.fromhex(said["secret"])

    def membership(self, config: WorkerConfig) -> Membership:
        """This rank's place in its replica, on the device that --device and its number on this machine give it.

        Sums are in the order of the ranks where answers may not depend on the batch: always on CPUs.
        """
        place = self._place
        device = choose_device(config.device, place.local_rank)
        is_ordered = device.type == "cpu" or config.batch_invariant
        return Membership(self.group(device, is_ordered=is_ordered), place.num_local_ranks, place.local_rank)

    def group(self, device: torch.device, *, is_ordered: bool) -> TorchGroup:
        """The process group of all ranks, NCCL between GPUs and gloo between CPUs; see TorchGroup for `is_ordered`."""
        if is_loopback(self._place.master_address):
            # Else gloo looks the host's name up, and listens wherever that leads.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            _BACKENDS[device.type],
            device_id=device if device.type == "cuda" else None,
            store=self._store,
            rank=self._place.rank,
            world_size=self._place.num_ranks,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        world = dist.group.WORLD
        assert world is not None
        return TorchGroup(world, device, is_ordered=is_ordered)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
