"""Requests whose answers are kept: jobs, which nobody waits for, and those that are sent again under one key."""
