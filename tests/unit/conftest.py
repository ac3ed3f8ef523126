"""Settings of Hypothesis for all unit tests; and Triton's interpreter, before anything imports Triton."""

import os

import triton_here  # noqa: F401
from hypothesis import HealthCheck, settings

# A machine that is busy with other tests may stop a process for longer than Hypothesis gives an example, or all that it
# makes before a test: no error. All else stays as Hypothesis has it here.
# The same examples in each run of the same code: a fault that one run in a thousand finds belongs to who looks for it,
# with HYPOTHESIS_PROFILE=random.
busy = settings(settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", busy)
settings.register_profile("steady", busy, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
