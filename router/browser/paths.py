"""Where Connect and gRPC-Web are on the HTTP port: the paths of the public service's methods. Knows no protocol."""

from __future__ import annotations

from octavo.v1 import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
MOUNT_PATH = f"/{SERVICE.full_name}"
PATHS = frozenset(f"{MOUNT_PATH}/{method.name}" for method in SERVICE.methods)
