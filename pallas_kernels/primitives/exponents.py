"""Exponentials as powers of two, and the least values of running maxima."""

from __future__ import annotations

import math

import numpy as np

LOG2_E = math.log2(math.e)
"""exp(x) is exp2(LOG2_E * x)."""
LOWEST = float(np.finfo(np.float32).min)
"""The start of a maximum: below everything but -inf, and finite, so that -inf - LOWEST is not NaN."""
LOWEST_LOGIT = -1e38
"""The same where maxima are multiplied by LOG2_E, which leaves this one finite. A row needs one logit above it."""
LOWEST_SCORE = -1e30
"""The same in base 2 where hidden scores take it: far below every score, so that exp2(hidden - maximum) is 0."""
