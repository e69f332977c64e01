"""How sequences fail by themselves, in words; `stream` decides when."""

from __future__ import annotations

from router.errors import ErrorKind
from router.streams.types import Failed, StreamSpec


def numeric_error(replica: str) -> Failed:
    """The worker met what is no number. `replica` is empty where it is not known."""
    where = f"replica {replica}" if replica else "the replica"
    return Failed(ErrorKind.INTERNAL, f"the model's logits held NaN or infinity on {where}")


def grammar_error(num_tokens: int) -> Failed:
    """What the answer is held to has no way on."""
    return Failed(
        ErrorKind.INVALID_ARGUMENT,
        f"after {num_tokens} tokens the grammar of the answer allows no token of the model, or has become too complex "
        "to follow; simplify it",
        by_grammar=True,
    )


def no_new_token(num_attempts: int, replica: str, spec: StreamSpec) -> Failed:
    """Tokens were lost again and again. `replica` is empty where it is not known."""
    return Failed(
        ErrorKind.UNAVAILABLE,
        f"{num_attempts} attempts brought no new token: what replica {replica or '(unknown)'} sends does not reach "
        f"this router at {spec.endpoint}",
    )


def not_taken_over(spec: StreamSpec) -> Failed:
    """Nobody went on with it."""
    limit = f"{spec.recovery_timeout_s:g} s (--recovery-timeout)"
    return Failed(ErrorKind.UNAVAILABLE, f"no replica took the sequence over within {limit}")
