"""Settings of Hypothesis for all unit tests."""

from hypothesis import HealthCheck, settings

# A machine that is busy with other tests may stop a process for longer than Hypothesis gives an example, or all that it
# makes before a test: no error. All else stays as Hypothesis has it here.
settings.register_profile("any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
