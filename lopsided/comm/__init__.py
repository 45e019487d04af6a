"""Processes that talk: who is who, unequal collectives, redistribution, watching over each other."""
