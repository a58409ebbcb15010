"""What each kind costs in quality: the held-out loss against bf16, as docs/benchmarks.md has it.

    python benchmarks/training.py --checkpoint FOLDER --data FILE --num-steps 300

One small model and one learning rate: the figures order the kinds, and do not say what another model loses.
tests/advice/test_quality.py compares them with the table.
"""

from typing import NamedTuple

SOURCE = (
    "held-out loss: the difference from none, measured for a Llama of 0.66 M parameters, 300 steps, 3 seeds "
    "(docs/benchmarks.md); your model may differ, so compare eval_loss"
)


class Quality(NamedTuple):
    """A difference of held-out losses, mean and standard deviation over three seeds."""

    difference: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.difference:+.4f} ± {self.deviation:.4f}"


MEASURED = {
    "int8_rowcol": Quality(0.0008, 0.0002),
    "int8_rotated": Quality(0.0007, 0.0001),
    "int8_tensorwise": Quality(0.0068, 0.0008),
    "float8_tensorwise": Quality(0.0060, 0.0009),
    "float8_delayed": Quality(0.0062, 0.0003),
    "float8_rowwise": Quality(0.0053, 0.0011),
    "float8_rowwise_with_gw_hp": Quality(0.0051, 0.0010),
    "float8_blockwise": Quality(0.0037, 0.0008),
    "mxfp8": Quality(0.0053, 0.0011),
    "int8_weight_only": Quality(0.0033, 0.0005),
}
"""Kind -> its quality with the default options. `none` is the reference."""
