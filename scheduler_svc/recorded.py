"""The core's inputs as records, without what is nobody's business. Knows plain data and protobuf; keeps nothing.

Prompts are left out unless token ids are wanted. Names of tenants, groups, salts and blocks are replaced by hashes of a
secret salt, which tell nothing but whether two are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from octavo.internal.v1 import recording_pb2 as pb
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.types import Request

HASH_BYTES = 8


class Pseudonyms:
    """Replacements under one salt."""

    def __init__(self, salt: bytes) -> None:
        """`salt` is secret, 16 random bytes for each start of the scheduler."""
        self._salt = salt

    @property
    def salt_id(self) -> str:
        """Names the salt without telling it."""
        return blake2b(self._salt, digest_size=HASH_BYTES, person=b"octavo salt id").hexdigest()

    def name(self, name: str) -> str:
        """Of a tenant, group or cache salt. Nothing stays nothing."""
        return blake2b(name.encode(), key=self._salt, digest_size=HASH_BYTES).hexdigest() if name else ""

    def block(self, digest: bytes) -> bytes:
        """Of a full block, which the digest names to those who know its tokens."""
        return blake2b(digest, key=self._salt, digest_size=HASH_BYTES).digest()

    def request(self, request: Request, has_tokens: bool) -> pb.RecordedRequest:
        """A request; with its token ids if wanted."""
        return pb.RecordedRequest(
            sequence_id=request.sequence_id,
            model=request.model,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_prior_tokens=len(request.prior_token_ids),
            token_ids=(*request.prompt_token_ids, *request.prior_token_ids) if has_tokens else (),
            max_tokens=request.max_tokens,
            prompt_logprobs_start=request.prompt_logprobs_start,
            adapter=request.adapter,
            tenant=self.name(request.tenant),
            cache_salt=self.name(request.cache_salt),
            priority=request.priority,
            deadline_ns=request.deadline_ns,
            age_ns=request.age_ns,
            group_id=self.name(request.group_id),
            group_size=request.group_size,
            router_id=request.router_id,
            attempt=request.attempt,
            crash_group_sizes=request.crash_group_sizes,
            queue_events=request.queue_events,
        )

    def contents(self, sequence: Sequence) -> Iterator[pb.RecordedContent]:
        """What the core knew a sequence's blocks by, for each kind of replica."""
        chain = sequence.chain
        while chain is not None:
            yield pb.RecordedContent(
                sequence_id=sequence.sequence_id,
                block_size=chain.block_size,
                fingerprint=chain.fingerprint,
                block_hashes=[int.from_bytes(self.block(digest), "little") for digest in chain.digests],
            )
            chain = chain.other


def result_record(replica_id: int, result: StepResult, has_tokens: bool) -> pb.RecordedResult:
    """A step's result."""
    is_full = len(result.token_ids) == len(result.num_sampled)
    return pb.RecordedResult(
        replica_id=replica_id,
        step=result.step,
        num_rows=len(result.num_sampled),
        silent_rows=[] if is_full else [row for row, num in enumerate(result.num_sampled) if num == 0],
        token_ids=result.token_ids if has_tokens else (),
        finished_rows=list(result.finishes),
        finish_reasons=[reason.value for reason in result.finishes.values()],
        undelivered_rows=result.undelivered_rows,
        duration_ns=result.duration_ns,
        copy_ns=result.copy_ns,
    )
