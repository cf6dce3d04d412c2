"""Commands that inspect, compare, move and sign archives."""
