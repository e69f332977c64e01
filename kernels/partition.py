"""How attention divides a context. Knows a number, and is imported where torch must not be."""

# Attention sums over KV positions [i * 256, (i + 1) * 256), then over i: a constant of the numerics, not the cache's.
KV_PARTITION = 256
