"""lptune: full fine-tuning of Hugging Face checkpoints in low precision.

The parts are imported where they are used (`from lptune import linear`), so that importing
this package costs nothing: `lptune --help` must not load torch.
"""

__version__ = "0.2.0"
