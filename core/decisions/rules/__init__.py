"""Rules that several rooms decide by, and the simulator."""
