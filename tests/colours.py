"""How far two colours are apart, for eyes of several kinds: what tests of pictures and tables ask.

Eyes: Machado, Oliveira, Fernandes 2009, severity 1.0, on linear RGB. Distance: CIEDE2000, as Sharma, Wu, Dalal
2005 write it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Lab = NDArray[np.float64]

EYES: Mapping[str, Lab] = {
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


def seen(color: str, eyes: str = "all cones") -> Lab:
    """CIE Lab (D65) of '#rrggbb' for such eyes."""
    rgb = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = EYES[eyes] @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(linear, 0, 1) / [0.95047, 1, 1.08883]
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def hue(color: str) -> tuple[float, float]:
    """Its hue in degrees, and its chroma."""
    _, a, b = seen(color)
    return math.degrees(math.atan2(b, a)) % 360, math.hypot(a, b)


def ciede2000(one: Lab, other: Lab) -> float:
    (l1, a1, b1), (l2, a2, b2) = (map(float, color) for color in (one, other))
    mean = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    grey = 1.5 - 0.5 * math.sqrt(mean**7 / (mean**7 + 25**7))
    c1, c2 = math.hypot(grey * a1, b1), math.hypot(grey * a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, grey * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    wide = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2))
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    if not c1 * c2:
        middle = h1 + h2
    elif abs(h1 - h2) <= 180:
        middle = (h1 + h2) / 2
    else:
        middle = (h1 + h2 + (360 if h1 + h2 < 360 else -360)) / 2
    cosines = ((0.17, 1, -30), (-0.24, 2, 0), (-0.32, 3, 6), (0.2, 4, -63))
    weight = 1 - sum(factor * math.cos(math.radians(n * middle + shift)) for factor, n, shift in cosines)
    of_light = 1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2)
    of_chroma, of_hue = 1 + 0.045 * chroma, 1 + 0.015 * chroma * weight
    blue = 30 * math.exp(-(((middle - 275) / 25) ** 2))
    rotation = -math.sin(math.radians(2 * blue)) * 2 * math.sqrt(chroma**7 / (chroma**7 + 25**7))
    dl, dc, dh = (l2 - l1) / of_light, (c2 - c1) / of_chroma, wide / of_hue
    return math.sqrt(dl**2 + dc**2 + dh**2 + rotation * dc * dh)


def closest(colors: Mapping[str, str], eyes: str) -> tuple[float, str, str]:
    """The two of these that such eyes tell apart worst, and how far apart they are."""
    labs = {name: seen(color, eyes) for name, color in colors.items()}
    return min((ciede2000(labs[a], labs[b]), a, b) for a, b in combinations(labs, 2))
