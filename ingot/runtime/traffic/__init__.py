"""Traffic shared between the model that answers and a candidate."""
