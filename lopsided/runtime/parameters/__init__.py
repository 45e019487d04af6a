"""A model's parameters as this process's pieces: cut, initialised, adopted, updated, compared."""
