"""How far apart colours are, for readers of every kind of colour vision."""

import itertools
from collections.abc import Sequence

import numpy as np

VISION = {
    "all cones": np.eye(3),
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
"""What is left of linear sRGB without one kind of cones: Machado, Oliveira and Fernandes, 2009."""

_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear(colour: str) -> np.ndarray:
    """The linear sRGB of `#rrggbb`."""
    srgb = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def _oklab(rgb: np.ndarray) -> np.ndarray:
    return _LAB @ np.cbrt(_LMS @ np.clip(rgb, 0, 1))


def least_distance(colours: Sequence[str], vision: str) -> float:
    """The distance in Oklab of the two colours that are the most alike; black and white are 1 apart."""
    seen = [_oklab(VISION[vision] @ linear(colour)) for colour in colours]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))


def contrast(first: str, second: str) -> float:
    """The contrast of two colours as WCAG defines it: 4.5 is readable."""
    light, dark = sorted((float(linear(colour) @ (0.2126, 0.7152, 0.0722)) for colour in (first, second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
