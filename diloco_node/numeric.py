"""Array types and units that every layer shares.

The aliases say which values an array holds; its shape is in the docstring of whoever takes or returns it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

NS_PER_S: Final = 1_000_000_000
"""Nanoseconds in a second: the core counts time in whole nanoseconds."""
