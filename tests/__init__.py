"""Tests lie as the packages do: `tests/<package>/test_<module>.py`. What several of them use is in `support`."""
