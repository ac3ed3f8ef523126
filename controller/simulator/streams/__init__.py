"""Language models in the simulator: streams of tokens that join, are computed in steps, and end. Pure."""
