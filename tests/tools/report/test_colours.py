"""The colours of runs can be told apart by every kind of colour vision, and seen on their background."""

import itertools

import numpy as np
import pytest

from lptune.tools.report.svg import COLOURS, COLOURS_DARK, NEUTRAL, NEUTRAL_DARK

# Linear RGB as seen without the red, green or blue cones (Machado, Oliveira, Fernandes 2009, severity 1).
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])  # sRGB, D65


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def cielab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = TO_XYZ @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    fx, fy, fz = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


def contrast(a: str, b: str) -> float:
    low, high = sorted(TO_XYZ[1] @ linear(colour) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def test_the_model_knows_a_famous_confusion() -> None:
    green, red = (cielab(VISION["deuteranopia"] @ linear(colour)) for colour in ("#7f9f00", "#d87f00"))
    assert (
        np.linalg.norm(green - red)
        < 20
        < np.linalg.norm(cielab(linear("#7f9f00")) - cielab(linear("#d87f00")))
    )
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colours", [COLOURS, COLOURS_DARK], ids=["light", "dark"])
def test_any_two_colours_are_apart(colours: tuple[str, ...], vision: str) -> None:
    seen = [cielab(VISION[vision] @ linear(colour)) for colour in colours]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) >= 20


def test_every_colour_stands_out_from_its_background() -> None:
    assert min(contrast(colour, "#ffffff") for colour in (*COLOURS, NEUTRAL)) >= 4
    assert min(contrast(colour, "#14171b") for colour in (*COLOURS_DARK, NEUTRAL_DARK)) >= 6
