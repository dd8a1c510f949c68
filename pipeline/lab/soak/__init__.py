"""A server under mixed and rude clients for minutes: what must hold, and whether it did."""
