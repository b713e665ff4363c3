"""What all tests share."""

from hypothesis import HealthCheck, settings

# The same examples on every run: a failure in CI is a failure at the desk. Machines differ in speed, so no deadline.
settings.register_profile("farmhand", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("farmhand")
