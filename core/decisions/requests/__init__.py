"""Decisions about requests, functions and instances. In: events, and the time. Out: actions."""
