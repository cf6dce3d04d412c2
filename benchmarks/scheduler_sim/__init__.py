"""The scheduler beside other policies, in simulated time."""
