"""The demonstration: real workers of unequal speed train a small GPT three ways, side by side."""
