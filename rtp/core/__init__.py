"""Decisions: plain objects driven by events and a given time. No sockets, clocks, threads or
logs."""
