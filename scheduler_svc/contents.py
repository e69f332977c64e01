"""What a recording tells of its sequences' blocks: their names, and tokens made up from them.

Beginnings are equal exactly where they were, because equal names give equal tokens. Knows records; must not know the
core.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from octavo.internal.v1 import recording_pb2 as pb


class Contents:
    """Of all sequences of a recording."""

    def __init__(self, records: Iterable[pb.Record]) -> None:
        self._contents: dict[int, list[pb.RecordedContent]] = {}
        for record in records:
            if record.HasField("content"):
                self._contents.setdefault(record.content.sequence_id, []).append(record.content)

    def block_names(self, sequence_id: int) -> dict[tuple[str, int], list[bytes]]:
        """As Request.block_names."""
        return {
            (content.fingerprint, content.block_size): [name.to_bytes(8, "little") for name in content.block_hashes]
            for content in self._contents.get(sequence_id, ())
        }

    def token_id(self, sequence_id: int, position: int) -> int:
        """The token at a position of a sequence, prompt included; below 2**32."""
        content = self._longest(sequence_id)
        if content is None or position >= content.block_size * len(content.block_hashes):
            # In a block that never was full, or of which nothing is known: like no other.
            digest = blake2b(b"%d.%d" % (sequence_id, position), digest_size=4).digest()
            return int.from_bytes(digest, "little")
        block, offset = divmod(position, content.block_size)
        # Two words hold a name; in blocks of one token the first must do.
        return (content.block_hashes[block] >> (32 * offset)) & 0xFFFFFFFF if offset < 2 else 0

    def num_tokens(self, sequence_id: int) -> int:
        """Tokens in the full blocks of a sequence that are known; 0 of none."""
        content = self._longest(sequence_id)
        return content.block_size * len(content.block_hashes) if content is not None else 0

    def tokens(self, sequence_id: int, begin: int, end: int) -> array[int]:
        """Tokens at positions begin ... end - 1."""
        return array("I", (self.token_id(sequence_id, position) for position in range(begin, end)))

    def _longest(self, sequence_id: int) -> pb.RecordedContent | None:
        contents = self._contents.get(sequence_id, ())
        return max(contents, key=lambda content: content.block_size * len(content.block_hashes), default=None)
