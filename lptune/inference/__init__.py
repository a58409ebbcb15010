"""Uses a trained model: loads it from anywhere, and generates text.

    loaded = load_model("runs/finetune", cfg.precision, "bfloat16", world, num_tokens=8)

The model is whole on one device. Each rank of several has all of it.
"""

from lptune.inference.model import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
