"""Octavo: serves large language models over gRPC."""
