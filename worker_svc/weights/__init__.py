"""From a model's files to the tensors it asks for."""

from worker_svc.weights.checkpoint import Checkpoint, ExpectedTensor, Part, TensorSpec, WeightsError
from worker_svc.weights.load import Weights, open_checkpoint

__all__ = ["Checkpoint", "ExpectedTensor", "Part", "TensorSpec", "Weights", "WeightsError", "open_checkpoint"]
