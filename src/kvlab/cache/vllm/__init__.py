"""The vLLM plugin where the model is: which settings it refuses, and the tap that codes K and V inside attention."""
