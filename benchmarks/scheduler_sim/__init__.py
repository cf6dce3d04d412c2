"""The scheduler compared with other policies in simulated time."""
