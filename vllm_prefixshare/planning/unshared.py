"""Why a plan shares nothing."""

from typing import NamedTuple

#: Reasons for which a plan that cannot be used is replaced by one without sharing.
PLANNING_FAILED = "planning failed"
PLAN_TOO_LARGE = "plan too large"
#: Reasons for which the right plan shares nothing.
SHARING_OFF = "sharing is switched off"
ONE_REQUEST = "one request at a time"
NO_COMMON_PREFIX = "no common prefix"
NO_GAIN = "no gain expected"


class Unshared(NamedTuple):
    """Why a plan shares nothing.

    reason: one of the reasons above.
    expected_gain: fraction of the attention time that sharing would save by the cost model,
        negative if it would cost time; None if the model was not asked.
    """

    reason: str
    expected_gain: float | None = None
