"""The `structured_output` of a gRPC request, read into one `GrammarSpec`. Knows the public protos and the same rules
as `fields`."""

from __future__ import annotations

from octavo.v1 import inference_pb2 as pb
from router.errors import InvalidRequest
from router.structured import fields
from router.structured.spec import GrammarSpec

PATH = "sampling.structured_output"


def read_structured_output(sampling: pb.SamplingParams) -> GrammarSpec | None:
    """What the answer must be; None leaves it free. Raises InvalidRequest naming the field."""
    if not sampling.HasField("structured_output"):
        return None
    asked = sampling.structured_output
    pattern = asked.whitespace_pattern if asked.HasField("whitespace_pattern") else None
    space = fields.whitespace_of(f"{PATH}.whitespace_pattern", pattern, compact=asked.disable_any_whitespace)
    match asked.WhichOneof("constraint"):
        case "json_schema":
            return fields.json_schema(f"{PATH}.json_schema", asked.json_schema, space)
        case "json_object" if asked.json_object:
            return fields.json_object(f"{PATH}.json_object", True, space)
        case "regex":
            return fields.regex(f"{PATH}.regex", asked.regex)
        case "choice":
            return fields.choice(f"{PATH}.choice", list(asked.choice.texts))
        case "grammar":
            return fields.grammar(f"{PATH}.grammar", asked.grammar)
    raise InvalidRequest(PATH, f"{PATH} constrains nothing; set one of its fields, or leave it out")
