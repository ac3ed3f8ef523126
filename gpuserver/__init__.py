"""The GPU side: executors, and the store that has the models."""
