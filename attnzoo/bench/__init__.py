"""Latency, peak memory, FLOPs and cache bytes against length, beside peers that do the same work."""
