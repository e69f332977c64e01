"""One rank's part of a model: the smaller decoder that it is, and which part of each checkpoint tensor it takes.

A table from names to parts, derived from `octavo.sharding`. Knows names and numbers; reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.sharding import DividedSizes, Share, share_of
from worker_svc.model.config import ModelConfig
from worker_svc.model.names import DecoderNames, LayerNames, expected_shapes
from worker_svc.weights.checkpoint import ExpectedTensor, Part

_ROWS, _COLUMNS = 0, 1


@dataclass(frozen=True)
class ModelShard:
    """A model as one rank holds it. `whole` is the model's config; one rank of one has all of it."""

    whole: ModelConfig
    share: Share

    @property
    def config(self) -> ModelConfig:
        """The decoder that the rank computes: its heads, channels and embedding rows, padded ones included."""
        sizes = self.share.sizes
        return replace(
            self.whole,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            intermediate_size=sizes.intermediate_size,
            num_embedding_rows=sizes.num_embedding_rows,
        )

    def expected(self) -> dict[str, ExpectedTensor]:
        """Every tensor that the rank takes, with its shape in the checkpoint and the part of it that is the rank's."""
        parts = dict(_parts(self.whole, self.share))
        return {name: ExpectedTensor(shape, parts.get(name)) for name, shape in expected_shapes(self.whole).items()}


def shard_model(config: ModelConfig, rank: int, num_ranks: int) -> ModelShard:
    """Raises octavo.sharding.ShardingError where so many ranks cannot share the model."""
    return ModelShard(config, share_of(divided_sizes(config), rank, num_ranks))


def divided_sizes(config: ModelConfig) -> DividedSizes:
    """The sizes of the model that ranks divide."""
    return DividedSizes(config.num_heads, config.num_kv_heads, config.intermediate_size, config.num_embedding_rows)


def _parts(config: ModelConfig, share: Share) -> Iterator[tuple[str, Part]]:
    """What is divided. Norms, and the biases of row-divided projections, every rank reads whole."""
    names = DecoderNames(config)
    for table in (names.embedding, names.head):
        yield table, Part(_ROWS, (share.embedding_rows,))
    for index in range(config.num_layers):
        layer = names.layer(index)
        heads = _scaled(share.heads, config.head_dim)
        yield f"{layer.output}.weight", Part(_COLUMNS, (heads,))
        yield f"{layer.down}.weight", Part(_COLUMNS, (share.intermediate,))
        yield from _column_parts(config, share, layer)


def _column_parts(config: ModelConfig, share: Share, layer: LayerNames) -> Iterator[tuple[str, Part]]:
    """Matrices and biases whose rows are outputs. A fused matrix holds its projections one below the other."""
    dim = config.head_dim
    heads, kv_heads = _scaled(share.heads, dim), _scaled(share.kv_heads, dim)
    q_width, kv_width = config.num_heads * dim, config.num_kv_heads * dim
    for names, ranges, widths in (
        (layer.qkv, (heads, kv_heads, kv_heads), (q_width, kv_width, kv_width)),
        (layer.gate_up, (share.intermediate, share.intermediate), (config.intermediate_size,) * 2),
    ):
        if config.fused_projections:
            starts = [sum(widths[:index]) for index in range(len(widths))]
            below = tuple(range(s + r.start, s + r.stop) for s, r in zip(starts, ranges, strict=True))
            parts = [Part(_ROWS, below)]
        else:
            parts = [Part(_ROWS, (rows,)) for rows in ranges]
        for name, part in zip(names, parts, strict=True):
            yield f"{name}.weight", part
            yield f"{name}.bias", part


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
