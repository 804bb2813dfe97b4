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
#: What an engine knows of the cause of ``NO_COMMON_PREFIX`` and ``SHARING_OFF``.
PREFIX_CACHING_OFF = "prefix caching is off"
NO_COST_TABLE = "no measured cost table"

FALLBACK_REASONS = (PLANNING_FAILED, PLAN_TOO_LARGE)
UNSHARED_REASONS = (
    NO_COMMON_PREFIX,
    PREFIX_CACHING_OFF,
    ONE_REQUEST,
    NO_GAIN,
    NO_COST_TABLE,
    SHARING_OFF,
)


class Unshared(NamedTuple):
    """Why a plan shares nothing.

    reason: one of the reasons above.
    expected_gain: fraction of the attention time that sharing would save by the cost model,
        negative if it would cost time; None if the model was not asked.
    """

    reason: str
    expected_gain: float | None = None
